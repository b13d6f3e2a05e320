import torch

torch.set_num_threads(1)  # models this small are slower on several threads
