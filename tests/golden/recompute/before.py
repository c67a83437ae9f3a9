import torch


# mtmc: x=f32[M,N] M=40 N=48
def row_and_column_sums(x):
    y = torch.tanh(x) * 0.5
    return y.sum(0), y.sum(1)
