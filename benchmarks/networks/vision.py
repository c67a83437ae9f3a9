"""Whole vision networks of torchvision and timm in inference: float16, random weights, batches of 1, 8 and 64."""

from __future__ import annotations

import timm
import torch
import torchvision
from torch import nn


class Vision(nn.Module):
    """A network in evaluation mode."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.half().eval().requires_grad_(False)


class ResNet50Of1(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.resnet50())

    # mtmc: x=f16[B,3,224,224] B=1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ResNet50Of8(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.resnet50())

    # mtmc: x=f16[B,3,224,224] B=8
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ResNet50Of64(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.resnet50())

    # mtmc: x=f16[B,3,224,224] B=64
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ConvNeXtTinyOf1(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.convnext_tiny())

    # mtmc: x=f16[B,3,224,224] B=1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ConvNeXtTinyOf8(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.convnext_tiny())

    # mtmc: x=f16[B,3,224,224] B=8
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ConvNeXtTinyOf64(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.convnext_tiny())

    # mtmc: x=f16[B,3,224,224] B=64
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class EfficientNetB0Of1(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.efficientnet_b0())

    # mtmc: x=f16[B,3,224,224] B=1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class EfficientNetB0Of8(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.efficientnet_b0())

    # mtmc: x=f16[B,3,224,224] B=8
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class EfficientNetB0Of64(Vision):
    def __init__(self) -> None:
        super().__init__(torchvision.models.efficientnet_b0())

    # mtmc: x=f16[B,3,224,224] B=64
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class SwinTinyOf1(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("swin_tiny_patch4_window7_224"))

    # mtmc: x=f16[B,3,224,224] B=1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class SwinTinyOf8(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("swin_tiny_patch4_window7_224"))

    # mtmc: x=f16[B,3,224,224] B=8
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class SwinTinyOf64(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("swin_tiny_patch4_window7_224"))

    # mtmc: x=f16[B,3,224,224] B=64
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ViTBaseOf1(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("vit_base_patch16_224"))

    # mtmc: x=f16[B,3,224,224] B=1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ViTBaseOf8(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("vit_base_patch16_224"))

    # mtmc: x=f16[B,3,224,224] B=8
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class ViTBaseOf64(Vision):
    def __init__(self) -> None:
        super().__init__(timm.create_model("vit_base_patch16_224"))

    # mtmc: x=f16[B,3,224,224] B=64
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)
