"""The equations of the trainer, one short float64 function each, written to be read against their source.

They import nothing but torch, take and return float64, and use plain differentiable operations, so that
autograd through them gives the reference gradients. They are slow on purpose: loops stand where the
definition has a sum.

Layouts are the trainer's own: products are ``y = x @ W.T``; ``qkv`` stacks the rows of q, k and v in this
order; ``gate_up`` stacks the rows of gate and up in this order. A ``padding`` mask is True where a token is
padding.
"""
