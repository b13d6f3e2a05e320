"""Other formats and libraries: Hugging Face folders, transformers, ONNX and the web page."""
