"""How the user's file uses ``torch.compile``, and how to add it."""
