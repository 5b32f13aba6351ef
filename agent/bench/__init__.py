"""Measures what saving and loading cost on this machine, with ckptd and with PyTorch's
own ways: the verb `ckptd bench`.
"""
