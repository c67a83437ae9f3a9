"""What the target's body is, and how its local modes (autocast, gradients, ``.data``) are traced."""
