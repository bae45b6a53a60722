"""Image, video and audio processors, one small module per model family, in NumPy and Pillow."""
