"""Bits and pieces used around our detection / restoration training code."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# --------------------------------------------------------------------------------------
# boxes
# --------------------------------------------------------------------------------------


def box_cxcywh_to_xyxy(x):
    x_c, y_c, w, h = x.unbind(-1)
    b = [(x_c - 0.5 * w), (y_c - 0.5 * h), (x_c + 0.5 * w), (y_c + 0.5 * h)]
    return torch.stack(b, dim=-1)


def box_area(boxes):
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


# mtmc: pred=f32[N,4]@0.05..0.95 target=f32[N,4]@0.05..0.95 N=2000000
def ciou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """Complete IoU loss, boxes given as (cx, cy, w, h)."""
    b1 = box_cxcywh_to_xyxy(pred)
    b2 = box_cxcywh_to_xyxy(target)
    w1, h1 = pred[:, 2], pred[:, 3]
    w2, h2 = target[:, 2], target[:, 3]

    # intersection / union
    lt = torch.max(b1[:, :2], b2[:, :2])
    rb = torch.min(b1[:, 2:], b2[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    union = w1 * h1 + w2 * h2 - inter + eps
    iou = inter / union

    # enclosing box
    cw = torch.max(b1[:, 2], b2[:, 2]) - torch.min(b1[:, 0], b2[:, 0])
    ch = torch.max(b1[:, 3], b2[:, 3]) - torch.min(b1[:, 1], b2[:, 1])
    c2 = cw**2 + ch**2 + eps
    rho2 = ((pred[:, :2] - target[:, :2]) ** 2).sum(-1)

    v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / (h2 + eps)) - torch.atan(w1 / (h1 + eps)), 2)
    alpha = v / (v - iou + (1 + eps))
    return (1.0 - iou + rho2 / c2 + v * alpha).mean()


# mtmc: logits=f32[B,Q,C] boxes=f32[B,Q,4]@0.02..0.98 tgt_labels=i64[B,T]@0..C-1 tgt_boxes=f32[B,T,4]@0.02..0.98 B=16 Q=900 C=91 T=60
def detr_matching_cost(
    logits,
    boxes,
    tgt_labels,
    tgt_boxes,
    cost_class: float = 2.0,
    cost_bbox: float = 5.0,
    cost_giou: float = 2.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
):
    """Cost matrix of the Hungarian matcher (the assignment itself is done on CPU)."""
    prob = logits.sigmoid()
    neg = (1 - alpha) * (prob**gamma) * (-(1 - prob + 1e-8).log())
    pos = alpha * ((1 - prob) ** gamma) * (-(prob + 1e-8).log())
    cls = pos - neg
    idx = tgt_labels.unsqueeze(1).expand(-1, logits.shape[1], -1)
    c_class = torch.gather(cls, 2, idx)

    c_bbox = (boxes[:, :, None] - tgt_boxes[:, None]).abs().sum(-1)

    a = box_cxcywh_to_xyxy(boxes)[:, :, None]
    b = box_cxcywh_to_xyxy(tgt_boxes)[:, None]
    wh = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = box_area(a) + box_area(b) - inter
    hull = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
    hull = hull[..., 0] * hull[..., 1]
    giou = inter / union - (hull - union) / hull

    return cost_bbox * c_bbox + cost_class * c_class - cost_giou * giou


# mtmc: logits=f16[B,A,K] targets=i64[B,A]@0..K B=8 A=24564 K=80
def retina_focal_loss(logits, targets, alpha: float = 0.25, gamma: float = 2.0):
    # class K is background
    num_classes = logits.shape[-1]
    onehot = F.one_hot(targets, num_classes + 1)[..., :num_classes].float()
    x = logits.float()
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, onehot, reduction="none")
    p_t = p * onehot + (1 - p) * (1 - onehot)
    loss = ce * ((1 - p_t) ** gamma)
    alpha_t = alpha * onehot + (1 - alpha) * (1 - onehot)
    num_pos = (targets < num_classes).sum().clamp(min=1)
    return (alpha_t * loss).sum() / num_pos


# --------------------------------------------------------------------------------------
# augmentation, everything batched and on the GPU
# --------------------------------------------------------------------------------------


def rgb_to_grayscale(img):
    r, g, b = img.unbind(dim=-3)
    return (0.2989 * r + 0.587 * g + 0.114 * b).unsqueeze(dim=-3)


def _blend(img1, img2, ratio):
    return (ratio * img1 + (1.0 - ratio) * img2).clamp(0, 1)


# mtmc: img=f32[B,3,H,W]@0..1 brightness=f32[B]@0.6..1.4 contrast=f32[B]@0.6..1.4 saturation=f32[B]@0.6..1.4 B=64 H=256 W=256
def color_jitter(img, brightness, contrast, saturation):
    """One factor per image, in the order brightness -> contrast -> saturation."""
    view = (-1, 1, 1, 1)
    img = _blend(img, torch.zeros_like(img), brightness.view(view))
    mean = rgb_to_grayscale(img).mean(dim=(-3, -2, -1), keepdim=True)
    img = _blend(img, mean, contrast.view(view))
    img = _blend(img, rgb_to_grayscale(img), saturation.view(view))
    return img


# mtmc: img=u8[B,H,W,3]@0..255 gamma=f32[B]@0.7..1.5 B=32 H=360 W=480
def preprocess_uint8(img, gamma, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)):
    """NHWC uint8 from the decoder -> normalised NCHW half."""
    x = img.permute(0, 3, 1, 2).float() / 255.0
    x = x.clamp(min=1e-4) ** gamma[:, None, None, None]
    m = torch.tensor(mean, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
    s = torch.tensor(std, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
    x = (x - m) / s
    return x.to(torch.float16).contiguous()


def _gauss1d(size, sigma, device, dtype):
    coords = torch.arange(size, device=device, dtype=dtype) - (size - 1) / 2
    g = torch.exp(-(coords**2) / (2 * sigma**2))
    return g / g.sum()


# mtmc: x=f32[B,3,H,W]@0..1 B=16 H=384 W=384
def gaussian_blur(x, ksize: int = 9, sigma: float = 1.7):
    c = x.shape[1]
    k = _gauss1d(ksize, sigma, x.device, x.dtype)
    pad = ksize // 2
    x = F.pad(x, (pad, pad, pad, pad), mode="reflect")
    x = F.conv2d(x, k.view(1, 1, 1, -1).repeat(c, 1, 1, 1), groups=c)
    x = F.conv2d(x, k.view(1, 1, -1, 1).repeat(c, 1, 1, 1), groups=c)
    return x


# mtmc: gray=f32[B,1,H,W]@0..1 B=48 H=511 W=385
def sobel_edges(gray, eps: float = 1e-6):
    """Gradient magnitude and direction."""
    g = F.pad(gray, (1, 1, 1, 1), mode="replicate")
    tl, t, tr = g[..., :-2, :-2], g[..., :-2, 1:-1], g[..., :-2, 2:]
    l, r = g[..., 1:-1, :-2], g[..., 1:-1, 2:]
    bl, b, br = g[..., 2:, :-2], g[..., 2:, 1:-1], g[..., 2:, 2:]
    gx = (tr + 2 * r + br - tl - 2 * l - bl) / 8
    gy = (bl + 2 * b + br - tl - 2 * t - tr) / 8
    mag = torch.sqrt(gx * gx + gy * gy + eps)
    return mag, torch.atan2(gy, gx)


# --------------------------------------------------------------------------------------
# metrics
# --------------------------------------------------------------------------------------


# mtmc: x=f32[B,3,H,W]@0..1 y=f32[B,3,H,W]@0..1 B=8 H=256 W=256
def ssim(x, y, window: int = 11, data_range: float = 1.0):
    """SSIM with a uniform window, one value per image."""
    c1 = (0.01 * data_range) ** 2
    c2 = (0.03 * data_range) ** 2
    mu_x = F.avg_pool2d(x, window, stride=1)
    mu_y = F.avg_pool2d(y, window, stride=1)
    sigma_x = F.avg_pool2d(x * x, window, stride=1) - mu_x**2
    sigma_y = F.avg_pool2d(y * y, window, stride=1) - mu_y**2
    sigma_xy = F.avg_pool2d(x * y, window, stride=1) - mu_x * mu_y
    num = (2 * mu_x * mu_y + c1) * (2 * sigma_xy + c2)
    den = (mu_x**2 + mu_y**2 + c1) * (sigma_x + sigma_y + c2)
    return (num / den).mean(dim=(1, 2, 3))


# mtmc: pred=f16[B,3,H,W]@0..1 target=f16[B,3,H,W]@0..1 B=24 H=512 W=510
def psnr_y(pred, target, border: int = 4):
    """PSNR on the luma channel, cropping the border like the SR papers do."""
    coef = (65.481, 128.553, 24.966)

    def luma(t):
        t = t.float().clamp(0, 1)
        return (coef[0] * t[:, 0] + coef[1] * t[:, 1] + coef[2] * t[:, 2] + 16.0) / 255.0

    diff = luma(pred) - luma(target)
    diff = diff[:, border:-border, border:-border]
    mse = diff.pow(2).mean(dim=(-2, -1))
    return -10.0 * torch.log10(mse + 1e-10)


# --------------------------------------------------------------------------------------
# blocks
# --------------------------------------------------------------------------------------


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of NCHW."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


# mtmc: x=f32[B,96,H,W] B=16 H=56 W=56 init: dim=96
class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, layer_scale=1e-6, expand=4):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = LayerNorm2d(dim)
        self.pwconv1 = nn.Linear(dim, expand * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(expand * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = self.norm(x)
        x = x.permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(x)))
        x = self.gamma * x
        return shortcut + x.permute(0, 3, 1, 2)


# mtmc: x=f32[B,256,H,W] B=32 H=56 W=56 init: channels=256
class SEBlock(nn.Module):
    def __init__(self, channels, reduction=16):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x):
        s = F.adaptive_avg_pool2d(x, 1)
        s = F.relu(self.fc1(s))
        s = F.hardsigmoid(self.fc2(s))
        return F.relu(x * s)


# mtmc: x=f32[B,128,H,W] B=32 H=40 W=40 init: channels=128
class CBAM(nn.Module):
    """Convolutional block attention module."""

    def __init__(self, channels, reduction=8, kernel_size=7):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels // reduction),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels),
        )
        self.spatial = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def forward(self, x):
        avg = self.mlp(x.mean(dim=(2, 3)))
        mx = self.mlp(x.amax(dim=(2, 3)))
        x = x * torch.sigmoid(avg + mx)[:, :, None, None]
        pooled = torch.cat([x.mean(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)], dim=1)
        return x * torch.sigmoid(self.spatial(pooled))


# mtmc: x=f16[B,192,H,W] scale=f16[B,192] shift=f16[B,192] skip=f16[B,192,H,W] B=8 H=64 W=96
def film_groupnorm_silu(x, scale, shift, skip, num_groups: int = 32):
    """Timestep-conditioned norm of the UNet, then the skip is concatenated."""
    h = F.group_norm(x.float(), num_groups).to(x.dtype)
    h = h * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    h = F.silu(h)
    return torch.cat([h, skip], dim=1)


# mtmc: feat=f32[B,48,H,W] lr=f32[B,3,H,W]@0..1 B=8 H=128 W=128
def pixel_shuffle_head(feat, lr, scale: int = 4, res_scale: float = 0.1):
    """Sub-pixel output on top of the nearest-upsampled input."""
    residual = F.pixel_shuffle(feat, scale)
    base = F.interpolate(lr, scale_factor=scale, mode="nearest")
    return (base + res_scale * torch.tanh(residual)).clamp(0.0, 1.0)


# mtmc: x=f32[B,3,224,224] B=64 init: img_size=224 patch=16 dim=384
class PatchEmbed(nn.Module):
    def __init__(self, img_size, patch, dim, in_chans=3):
        super().__init__()
        self.patch = patch
        n = (img_size // patch) ** 2
        self.proj = nn.Linear(in_chans * patch * patch, dim)
        self.norm = nn.LayerNorm(dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02)

    def forward(self, x):
        B, C, H, W = x.shape
        p = self.patch
        x = x.reshape(B, C, H // p, p, W // p, p)
        x = x.permute(0, 2, 4, 3, 5, 1).reshape(B, (H // p) * (W // p), p * p * C)
        x = self.norm(self.proj(x))
        x = torch.cat([self.cls_token.expand(B, -1, -1), x], dim=1)
        return x + self.pos_embed


# mtmc: cls=f16[B,80,A] dist=f16[B,64,A] anchors=f32[2,A]@0..640 stride=f32[1,A]@8..32 B=32 A=8400
def yolo_decode(cls, dist, anchors, stride, reg_max: int = 16):
    """Raw anchor-free head output -> (xyxy, score, class) before the top-k."""
    b, _, a = dist.shape
    proj = torch.arange(reg_max, device=dist.device, dtype=torch.float32)
    d = dist.float().view(b, 4, reg_max, a).softmax(2)
    d = (d * proj.view(1, 1, -1, 1)).sum(2)
    lt, rb = d.chunk(2, dim=1)
    x1y1 = anchors.unsqueeze(0) - lt * stride
    x2y2 = anchors.unsqueeze(0) + rb * stride
    score, label = cls.float().sigmoid().max(dim=1)
    return torch.cat([x1y1, x2y2], dim=1), score, label
