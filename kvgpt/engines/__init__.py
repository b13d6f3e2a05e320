"""Other engines for the loop and the sampler of model.py: ONNX Runtime, and the classes of transformers."""
