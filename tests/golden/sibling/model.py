import torch
from model_kernels import net_fits, net_launch, net_triton  # mtmc: kernels


class Net(torch.nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.layer = torch.nn.LSTM(8, hidden, 2)

    def forward(self, x):
        if net_fits(self, x, __name__):  # mtmc: dispatch
            return (net_triton if torch.compiler.is_compiling() else net_launch)(
                x, self.layer.weight_ih_l0, self.layer.weight_hh_l0, self.layer.bias_ih_l0, self.layer.bias_hh_l0,
                self.layer.weight_ih_l1, self.layer.weight_hh_l1, self.layer.bias_ih_l1, self.layer.bias_hh_l1,
            )
        return self.layer(x)[0]


def get_inputs():
    return [torch.randn(5, 3, 8)]


def get_init_inputs():
    return []
