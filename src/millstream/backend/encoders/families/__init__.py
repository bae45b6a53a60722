"""One module per family of encoders: from the names of its files to a function of tokens.

They are our own and not mlx-vlm's: its import takes three seconds and needs transformers, it lacks RoBERTa, MPNet,
DistilBERT and Nomic, and its projections are not fused. The tests compare both.
"""
