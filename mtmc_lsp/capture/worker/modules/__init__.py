"""What capture knows about modules: their dtype, and tensors outside parameters and buffers."""
