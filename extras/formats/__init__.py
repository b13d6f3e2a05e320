"""Other formats and libraries: Hugging Face folders, ONNX and the web page."""
