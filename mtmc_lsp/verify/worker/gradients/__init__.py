"""Expected gradients that rounding or a mask decides."""
