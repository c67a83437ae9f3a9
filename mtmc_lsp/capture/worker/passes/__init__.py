"""Graph passes that run between ``torch.export`` and the captured graph."""
