"""Stand-in until the lead's module lands."""

import torch


def num_threads(multiply_adds):
    return 1 if multiply_adds < 2**22 else torch.get_num_threads()
