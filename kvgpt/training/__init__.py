"""What train.py needs: the text, the objective, the optimizers, the state and the folder of a run, processes."""
