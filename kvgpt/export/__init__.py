"""What export.py writes: ONNX files, Hugging Face folders, the web page. Each is checked after it is written."""
