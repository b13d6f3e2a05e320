"""Models in files: checkpoints, Hugging Face folders, ONNX."""
