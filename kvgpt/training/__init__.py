"""What train.py needs: data, objective, optimizers, the state and the folder of a run, several processes."""
