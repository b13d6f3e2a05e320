"""Training behind train.py: settings, data, optimizers, the run folder, several processes."""
