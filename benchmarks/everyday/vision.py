"""Pieces of vision models and detectors, as people write them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: image=u8[B,H,W,3] mean=f32[3] std=f32[3] B=64 H=224 W=224
def normalize_image(image, mean, std):
    x = image.permute(0, 3, 1, 2).float() / 255.0
    return (x - mean[:, None, None]) / std[:, None, None]


class BottleneckTail(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    # mtmc: x=f32[B,C,H,W] identity=f32[B,C,H,W] B=32 C=256 H=56 W=56 init: channels=256
    def forward(self, x, identity):
        return F.relu(self.bn(x) + identity)


# mtmc: x=f16[B,C,H,W] s=f16[B,C] B=32 C=480 H=28 W=28
def excite(x, s):
    return x * torch.sigmoid(s)[:, :, None, None]


# mtmc: x=f32[B,C,H,W] B=64 C=512 H=14 W=14
def squeeze_mean_max(x):
    return torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)


# mtmc: a=f32[N,4]@0..100 b=f32[M,4]@0..100 N=4000 M=500
def box_iou(a, b):
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    return inter / (area_a[:, None] + area_b[None] - inter + 1e-7)


# mtmc: logits=f32[N,K] targets=f32[N,K]@0..1 N=100000 K=80
def sigmoid_focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = ce * (1 - p_t) ** 2
    alpha_t = 0.25 * targets + 0.75 * (1 - targets)
    return (alpha_t * loss).sum()


# mtmc: logits=f32[B,C,H,W] target=f32[B,C,H,W]@0..1 B=8 C=4 H=256 W=256
def soft_dice_loss(logits, target):
    probs = logits.softmax(dim=1)
    inter = (probs * target).sum(dim=(0, 2, 3))
    total = (probs + target).sum(dim=(0, 2, 3))
    return 1 - (2 * inter / (total + 1e-6)).mean()


# mtmc: x=f32[B,C*4,H,W] B=16 C=16 H=64 W=64
def shuffle_up(x):
    return F.relu(F.pixel_shuffle(x, 2))


# mtmc: pred=f32[N,4] target=f32[N,4] weight=f32[N] N=50000
def weighted_smooth_l1(pred, target, weight):
    diff = (pred - target).abs()
    loss = torch.where(diff < 0.11, 0.5 * diff * diff / 0.11, diff - 0.5 * 0.11)
    return (loss.sum(-1) * weight).sum() / weight.sum().clamp(min=1.0)
