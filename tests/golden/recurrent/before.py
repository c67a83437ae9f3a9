import torch


class Net(torch.nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.layer = torch.nn.LSTM(8, hidden, 2)

    def forward(self, x):
        return self.layer(x)[0]


def get_inputs():
    return [torch.randn(5, 3, 8)]


def get_init_inputs():
    return []
