"""Image processors: one small file a family, in numpy and Pillow."""
