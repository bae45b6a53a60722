"""NVIDIA's Parakeet on the modules of mlx-audio: TDT, RNN-T and CTC."""
