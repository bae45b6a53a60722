"""Processors of images and other media: one small file a family, in numpy and Pillow."""
