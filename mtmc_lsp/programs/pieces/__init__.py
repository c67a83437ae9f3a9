"""Parts that families of programs are put together from: each takes tensors, writes statements and returns a tensor."""
