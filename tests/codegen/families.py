"""Operations for which the built-in coder writes kernels, as ``inputs: expression`` of a user function.

An input without a type is ``[B,6,7]``; ``F`` stands for the dtype under test.
"""

from __future__ import annotations

import re

POINTWISE = {
    "chain": "x, y=F[6,1]: F.silu(x * 2 + 1) - torch.exp(-y.abs()) / 3",
    "scalars and promotion": "x, i=i32[B,6,7]@-3..3, m=bool[7]: torch.where(m, x * i, 1) + m",
    "activations": "x: F.gelu(x) + F.mish(x) * F.elu(x) - F.hardswish(x) + F.softplus(x) + F.leaky_relu(x)",
    "further activations": "x: F.selu(x) + F.celu(x, 0.5) + F.hardtanh(x) + F.softshrink(x) + F.tanhshrink(x) + F.logsigmoid(x)",
    "gated": "x: F.glu(x, 1)",
    "aliases": "x, y=F[6,1]: torch.multiply(torch.clip(x, -1, 1), torch.subtract(y, 1)) + torch.divide(x, 3).negative()",
    "learned slope": "x, w=F[6]: F.prelu(x, w)",
    "functions": "x: torch.atan(x) + torch.asinh(x) + torch.log1p(x.abs()) + torch.expm1(x) + torch.erf(x) + torch.sinc(x)",
    "two operands": "x, y=F[7]: torch.hypot(x, y) + torch.maximum(x, y) + torch.logaddexp(x, y) + torch.lerp(x, y, 0.3)",
    "integers": "i=i64[B,6]@-9..9, j=i32[6]@1..5: (i // j + i % j) ^ (i << 2) & ~j",
    "clamped and masked": "x, y=F[7]: torch.clamp(x, max=y).masked_fill(x < 0, -1.0).nan_to_num()",
    "dropout by seed": "x: F.dropout(x, 0.3) * 2",
    "angles": "x, y: torch.atan2(x, y) * torch.asin(torch.tanh(x)) + torch.acos(torch.tanh(y))",
    "signs": "x, y: torch.copysign(x, y) * torch.sgn(y) + torch.frac(x) + torch.logit(torch.sigmoid(x))",
    "gamma functions": "x, y: torch.lgamma(x) * 0.1 + torch.digamma(x.abs() + 1) + torch.polygamma(1, y.abs() + 1)",
    "inverse errors": "x: torch.erfinv(torch.tanh(x)) + torch.special.ndtri(torch.sigmoid(x)) + torch.special.log_ndtr(x)",
    "modified Bessel functions": "x: torch.i0(x) + torch.special.i0e(x) + torch.special.i1(x) - torch.special.i1e(x)",
    "Bessel functions": "x: torch.special.bessel_j0(x.float()) + torch.special.bessel_j1(x.float() * 4)",
    "polynomials": "x: torch.special.chebyshev_polynomial_t(x.float(), 5) + torch.special.legendre_polynomial_p(x.float(), 3)",
    "sign bits": "x, y: torch.where(torch.signbit(x * y), torch.angle(x), torch.ldexp(y, torch.sign(x)))",
    "decimals": "x: torch.round(x * 2, decimals=2)",
    "positions": "x: x + torch.arange(7, device=x.device) * torch.linspace(0, 1, 7, device=x.device)",
}
VIEWS = {
    "rotated halves": "x: torch.cat((-x[..., 3:], x[..., :3]), -1) * x",
    "stacked": "x: torch.stack((x, x.exp()), 1) + 1",
    "padded": "x: F.pad(x.exp(), (1, 2), value=1.0)",
    "flipped and rolled": "x: torch.roll(x.flip(-1) * 2, 3, -1)",
    "strided": "x: x[:, ::2].exp() + x[:, 1::2]",
    "transposed": "x: x.transpose(1, 2).exp().contiguous()",
    "repeated": "x: x.repeat(1, 2, 1) + torch.repeat_interleave(x, 2, 1)",
    "shuffled": "x=F[B,8,3,5]: F.pixel_shuffle(x * 2, 2)",
    "triangles": "x: torch.tril(x) + torch.triu(x, 1) * 2",
    "split": "x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1]",
    "reflection padding": "x=F[B,3,5,4]: F.pad(x * 2, (2, 3, 1, 0), mode='reflect')",
    "replication padding": "x=F[B,3,5,4]: F.pad(x, (2, 1, 0, 3), mode='replicate').exp()",
    "circular padding": "x: F.pad(x * 2, (3, 2), mode='circular')",
    "negative padding": "x: F.pad(x.exp(), (-2, 1, 1, -3), value=0.5)",
    "diagonals": "x=F[B,5,7]: torch.diagonal(x * 2, 1, -2, -1) + torch.diagonal(x.exp(), -1, 1, 2)[:, :1]",
    "diag_embed": "x: torch.diag_embed(x * 2, -1) + torch.diag_embed(x, 1, 1, -1).transpose(1, 2)",
    "trace": "x=F[6,6]: torch.trace(x * 2) + torch.diag(x).sum()",
    "cross": "x=F[B,3], y=F[B,3]: torch.linalg.cross(x * 2, y)",
    "blocks": "x, y=F[2,3]: torch.block_diag(x[0] * 2, y)",
    "columns": "x: torch.column_stack((x[:, 0] * 2, x[:, 1, 0]))",
    "long identity": "x=F[300,7]: torch.eye(300, dtype=x.dtype, device=x.device) @ x + torch.eye(300, 7, dtype=torch.bool, device=x.device)",
    "shifted spectra": "x: torch.fft.fftshift(x * 2) + torch.fft.ifftshift(x, dim=1)",
    "shifted spectra of named sizes": "x=F[B,B]: torch.fft.fftshift(x * 2, dim=1)",
    "outer": "a=F[B], b=F[9]: torch.outer(a, b) + 1",
}
REDUCTIONS = {
    "sum": "x: x.sum(-1)",
    "mean over several dimensions": "x: (x * 2).mean((0, -1), keepdim=True)",
    "extremes": "x: torch.amax(x, 1) - torch.amin(x, 1)",
    "argmax": "x: x.argmax(-1)",
    "argmin of a middle dimension": "x: x.argmin(1)",
    "product": "x: x.prod(-1)",
    "any and all": "x: (x > 0).any(-1) & (x > -1).all(-1)",
    "variance": "x: x.var((0, 2))",
    "deviation": "x: x.std(-1, unbiased=False)",
    "sum of all elements": "x: (x * x).sum()",
    "norms": "x: x.norm(dim=-1) + x.norm(p=1, dim=-1) + torch.linalg.vector_norm(x, 3, -1) + x.abs().amax(-1)",
    "normalised": "x: F.normalize(x, dim=-1)",
    "log of sums": "x: torch.logsumexp(x, -1)",
    "softmax": "x: torch.softmax(x / 0.7, -1)",
    "softmax of columns": "x: torch.softmax(x, 1)",
    "log softmax": "x: torch.log_softmax(x, -1) * 2",
    "masked softmax": "x, m=bool[6,7]: torch.softmax(x.masked_fill(m, -1e4), -1)",
    "count and NaN": "x: x.nansum(-1) + torch.count_nonzero(x, -1)",
    "matrix norm": "x: torch.linalg.matrix_norm(x) + torch.linalg.norm(x, dim=(1, 2)) + torch.dist(x, x * 2)",
    "mean without NaN": "x: torch.nanmean(x, -1) + torch.aminmax(x, dim=-1)[0]",
    "trapezoid": "x: torch.trapezoid(x, dim=-1) * 2",
    "similarity": "x, y: F.cosine_similarity(x, y, dim=-1)",
}
NORMS = {
    "layer": "x, w=F[7], b=F[7]: F.layer_norm(x, (7,), w, b)",
    "layer over two": "x: F.layer_norm(x, (6, 7))",
    "root mean square": "x, w=F[7]: F.rms_norm(x, (7,), w)",
    "group": "x, w=F[6], b=F[6]: F.silu(F.group_norm(x, 2, w, b))",
    "instance": "x: F.instance_norm(x)",
    "layer, alone": "x, w=F[7], b=F[7]: torch.native_layer_norm(x, (7,), w, b, 1e-5)[0]",
    "instance, evaluation": "x, m=F[6], v=F[6]@0.1..2: F.instance_norm(x, m, v, use_input_stats=False)",
    "weights": "v=F[6,4,3], g=F[6,1,1]: torch._weight_norm(v, g, 0) * 2",
    "batch, evaluation": "x, m=F[6], v=F[6]@0.1..2, w=F[6], b=F[6]: F.relu(F.batch_norm(x, m, v, w, b))",
    "batch, training": "x, w=F[6], b=F[6]: F.batch_norm(x, None, None, w, b, training=True)",
    "batch, running": "x, m=F[6], v=F[6]@0.1..2: F.batch_norm(x, m, v, training=True)",
}
PRODUCTS = {
    "matrices": "a=F[B,9], b=F[9,8]: a @ b",
    "linear with prologue and epilogue": "a=F[B,9], w=F[8,9], b=F[8], r=F[B,8]: F.gelu(F.linear(F.silu(a), w, b)) + r",
    "batched": "a=F[2,B,9], b=F[2,9,8]: torch.bmm(a, b) * 2",
    "with addend": "c=F[8], a=F[B,9], b=F[9,8]: torch.addmm(c, a, b, beta=0.5, alpha=2)",
    "batched with addend": "c=F[2,B,8], a=F[2,B,9], b=F[2,9,8]: torch.baddbmm(c, a, b)",
    "einsum": "a=F[B,3,9], b=F[9,8]: torch.einsum('bij,jk->bik', a, b)",
    "einsum of heads": "q=F[B,5,2,8], k=F[B,6,2,8]: torch.einsum('bqhd,bkhd->bhqk', q, k)",
    "transposed operand": "a=F[9,B], b=F[9,8]: torch.relu(a.T @ b)",
    "matrix times its transpose": "a=F[B,9]: a @ a.T",
    "vector": "a=F[B,9], b=F[9]: a @ b",
    "bilinear layer": "a=F[B,3,5], w=F[8,5,6], b=F[B,3,6], c=F[8]: F.relu(F.bilinear(a * 2, b, w, c))",
    "one column": "a=F[B,9], b=F[9,1], w=F[1,9]: a @ b + F.linear(a, w)",
    "row vector": "a=F[9], b=F[9,B]: a @ b",
    "two vectors": "a=F[B], b=F[B]: a @ b",
    "vector with addend": "c=F[B], a=F[B,9], b=F[9]: torch.addmv(c, a, b, beta=0.5)",
    "sum of products": "c=F[6,8], a=F[B,6,9], b=F[B,9,8]: torch.addbmm(c, a, b, alpha=2)",
    "recurrent step": "x=F[B,6], h=F[B,4], w=F[4,6], u=F[4,4], b=F[4], d=F[4]: torch.rnn_tanh_cell(x, h, w, u, b, d)",
    "gated step": "x=F[B,6], h=F[B,4], w=F[12,6], u=F[12,4], b=F[12], d=F[12]: torch.gru_cell(x, h, w, u, b, d)",
    "step with memory": "x=F[B,6], h=F[B,4], c=F[B,4], w=F[16,6], u=F[16,4]: torch.lstm_cell(x, (h, c), w, u)[1]",
}
SCANS = {
    "sums": "x: torch.cumsum(x * 2, -1)",
    "sums of columns": "x: torch.cumsum(x, 1)",
    "products": "x: torch.cumprod(x, 1)",
    "log of sums": "x: torch.logcumsumexp(x, -1)",
    "reverse sums": "x: torch.cumsum(x.flip(-1), -1).flip(-1) * 2",
    "reverse products of columns": "x: torch.cumprod((x * 2).flip(1), 1).flip(1)",
    "exclusive sums": "x=F[B,9]: torch.cat((torch.zeros_like(x[:, :1]), torch.cumsum(x[:, :-1], 1)), 1) * 2",
    "integers": "i=i64[B,9]@-9..9: torch.cumsum(i, -1)",
}
LOSSES = {
    "squared": "x, y: F.mse_loss(x, y)",
    "absolute": "x, y: F.l1_loss(x, y, reduction='sum')",
    "smooth": "x, y: F.smooth_l1_loss(x, y, beta=0.5)",
    "huber": "x, y: F.huber_loss(x, y, reduction='none')",
    "binary": "x, y=F[B,6,7]@0..1: F.binary_cross_entropy(torch.sigmoid(x), y)",
    "binary of logits": "x, y=F[B,6,7]@0..1, p=F[7]@1..2: F.binary_cross_entropy_with_logits(x, y, pos_weight=p)",
    "divergence": "x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction='batchmean')",
    "cross entropy": "l=F[B,9], t=i64[B]@0..8: F.cross_entropy(l, t)",
    "cross entropy, smoothed": "l=F[B,9], t=i64[B]@0..8: F.cross_entropy(l, t, label_smoothing=0.1, reduction='sum')",
    "cross entropy, ignoring": "l=F[B,9], t=i64[B]@0..8: F.cross_entropy(l, t, ignore_index=3)",
    "cross entropy, weighted": "l=F[B,9], t=i64[B]@0..8, w=F[9]@0.1..1: F.cross_entropy(l, t, w, label_smoothing=0.1)",
    "cross entropy, probabilities": "l=F[B,9], p=F[B,9]@0..1: F.cross_entropy(l, p)",
    "cross entropy, images": "l=F[B,9,4], t=i64[B,4]@0..8: F.cross_entropy(l, t, reduction='none')",
    "likelihood": "l=F[B,9], t=i64[B]@0..8, w=F[9]@0.1..1: F.nll_loss(F.log_softmax(l, -1), t, w)",
    "cosine": "a=F[B,9], b=F[B,9], y=F[B]@1..1: F.cosine_embedding_loss(a, b, y)",
    "triplet": "a=F[B,9], p=F[B,9], n=F[B,9]: F.triplet_margin_loss(a, p, n)",
    "poisson": "x, y=F[B,6,7]@0..1: F.poisson_nll_loss(x, y)",
}
INDEXING = {
    "gather": "x, i=i64[B,6,3]@0..6: torch.gather(x, 2, i) * 2",
    "embedding": "i=i64[B,6]@0..10, w=F[11,8]: F.embedding(i, w) * 2",
    "rows": "w=F[11,8], i=i64[B,3]@-11..10: w[i]",
    "several indices": "x, i=i64[B,1]@-6..5, j=i64[3]@0..6: x[:, i, j] * 2",
    "non-adjacent indices": "x, i=i64[4]@0..B-1, j=i64[4]@-7..6: x[i, :, j].exp()",
    "one element per row": "x, i=i64[B]@0..5: x[torch.arange(x.shape[0], device=x.device), i] * 2",
    "columns": "x, i=i64[4]@0..5: torch.index_select(x, 1, i).exp()",
    "take_along_dim": "x, i=i64[B,6,1]@0..6: torch.take_along_dim(x, i, 2)",
    "filled": "x, i=i64[3]@-6..5: x.index_fill(1, i, 2.0) * 2",
    "one hot": "i=i64[B]@0..4, w=F[5]: F.one_hot(i, 5) * w",
}
ATTENTION = {
    "plain": "q=F[B,2,5,8], k=F[B,2,6,8], v=F[B,2,6,8]: F.scaled_dot_product_attention(q, k, v)",
    "causal": "q=F[B,2,5,8], k=F[B,2,5,8], v=F[B,2,5,8]: F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "masked": "q=F[B,2,5,8], k=F[B,2,6,8], v=F[B,2,6,8], m=bool[5,6]@1..1: F.scaled_dot_product_attention(q, k, v, m)",
    "biased": "q=F[B,2,5,8], k=F[B,2,6,8], v=F[B,2,6,8], m=F[B,1,5,6]: F.scaled_dot_product_attention(q, k, v, m)",
    "shared heads": "q=F[B,4,5,8], k=F[B,2,6,8], v=F[B,2,6,8]: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)",
    "softmax of a product": "q=F[B,5,8], k=F[B,6,8], v=F[B,6,8]: torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v",
}
CONVOLUTIONS = {
    "1d": "x=F[B,3,17], w=F[4,3,5], b=F[4]: F.conv1d(x, w, b, stride=2, padding=2, dilation=2)",
    "2d with prologue and epilogue": "x=F[B,3,6,5], w=F[5,3,3,3], b=F[5], r=F[B,5,6,5]: F.gelu(F.conv2d(F.relu(x), w, b, padding=1)) * 0.5 + r",
    "many channels": "x=F[B,19,4,3], w=F[17,19,3,3]: torch.tanh(F.conv2d(x, w, padding='same'))",
    "3d": "x=F[B,2,4,5,3], w=F[3,2,3,2,3]: F.conv3d(x, w, padding=1)",
    "groups": "x=F[B,20,5,6], w=F[8,5,3,2]: F.conv2d(x, w, stride=(2, 1), padding=(1, 0), groups=4) * 2",
    "1x1 kernel": "x=F[B,8,5,3], w=F[5,8,1,1]: F.conv2d(F.relu(x), w, stride=2)",
    "1x3 kernel": "x=F[B,8,5,3], w=F[5,8,1,3]: F.conv2d(x, w, stride=(2, 1), padding=(0, 1))",
    "named sizes": "x=F[B,B,B], w=F[4,B,3,2]: F.conv2d(x, w, padding=1) + 1",
    "depthwise": "x=F[B,6,5,4], w=F[6,1,3,3], b=F[6]: F.relu(F.conv2d(x, w, b, padding=1, groups=6))",
    "depthwise with multiplier": "x=F[B,6,9], w=F[12,1,3]: F.conv1d(x, w, stride=2, groups=6)",
    "transposed 1d": "x=F[B,4,6], w=F[4,3,4], b=F[3]: F.conv_transpose1d(x, w, b, stride=2, padding=1)",
    "transposed, as long as its phases": "x=F[B,4,3,4], w=F[4,3,3,3], b=F[3]: F.relu(F.conv_transpose2d(x, w, b, 2, 1, 1))",
    "transposed, cut": "x=F[B,4,3,4], w=F[4,3,3,3], b=F[3], r=F[B,3,7,9]: F.conv_transpose2d(x, w, b, stride=2) * r",
    "transposed groups": "x=F[B,4,3,4], w=F[4,2,3,2]: F.conv_transpose2d(x, w, None, (3, 1), 1, 0, 2, 2)",
    "transposed, of named sizes": "x=F[B,4,B,B], w=F[4,3,3,4], b=F[3]: F.relu(F.conv_transpose2d(x, w, b, (2, 3), (1, 2)))",
    "transposed groups of named sizes": "x=F[B,6,B,B], w=F[6,2,3,2]: F.conv_transpose2d(x, w, None, (2, 3), (1, 0), 0, 2, (2, 3))",
    "transposed 3d": "x=F[B,2,3,2,3], w=F[2,3,3,3,3]: F.conv_transpose3d(x, w, stride=2, padding=1)",
}
POOLING = {
    "max": "x=F[B,3,6,5]: F.max_pool2d(x * 2, 3, 2, 1)",
    "max, dilated": "x=F[B,3,7,6]: F.max_pool2d(x, (3, 2), 2, 1, dilation=2, ceil_mode=True)",
    "max in 1d and 3d": "x=F[B,2,5,4,4]: F.max_pool3d(x, 2, 2).flatten(2) + F.max_pool1d(x.flatten(2), 9)[..., :8]",
    "average": "x=F[B,3,19]: F.avg_pool1d(x, 4, 3, 1).exp()",
    "average without padding": "x=F[B,2,9,8]: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True, count_include_pad=False)",
    "average with ceil_mode": "x=F[B,2,9,8]: F.avg_pool2d(x, 4, 3, 2, ceil_mode=True)",
    "average in 3d": "x=F[B,2,5,4,3]: F.avg_pool3d(x.float(), 2, 1) + 1",
    "global average": "x=F[B,2,5,6]: F.adaptive_avg_pool2d(x.exp(), 1)",
    "adaptive average": "x=F[B,2,4,6]: F.adaptive_avg_pool2d(x.exp(), (2, 3))",
    "adaptive average, unequal windows": "x=F[B,2,7,5]: F.adaptive_avg_pool2d(x.exp(), (4, 3))",
    "adaptive average, windows of named sizes": "x=F[2,B,4*B,3*B]: F.adaptive_avg_pool2d(x.exp(), (4, 3))",
    "adaptive max, windows of named sizes": "x=F[2,B,4*B]: F.adaptive_max_pool1d(x * 2, 4)",
    "adaptive max, unequal windows": "x=F[B,2,7,5]: F.adaptive_max_pool2d(x * 2, (3, 5))",
    "adaptive max": "x=F[B,2,8]: F.adaptive_max_pool1d(x * 2, 4) + 1",
    "global max": "x=F[B,2,5,6]: F.adaptive_max_pool2d(x.exp(), 1)",
    "max, indices unused": "x=F[B,3,6,5]: F.max_pool2d(x, 2, return_indices=True)[0] * 2",
    "sum of averages": "x=F[B,2,6,4]: F.avg_pool2d(x, 2).sum((1, 2, 3))",
    "windows": "x: x.unfold(2, 3, 2) * 2",
    "windows as columns": "x=F[B,3,5,6]: F.unfold(x * 2, (2, 3), dilation=(2, 1), padding=1, stride=2)",
}
RESAMPLING = {
    "sampled at a grid": "x=F[B,3,5,6], g=F[B,4,3,2]: F.grid_sample(x, g, align_corners=False) * 2",
    "sampled nearest, at the border": "x=F[B,3,5,6], g=F[B,4,3,2]: F.grid_sample(x, g, 'nearest', 'border', align_corners=True)",
    "sampled, reflected": "x=F[B,3,5,6], g=F[B,4,3,2]: F.grid_sample(x, g, padding_mode='reflection', align_corners=False)",
    "nearest, doubled": "x=F[B,3,4,5]: F.interpolate(x * 2, scale_factor=2)",
    "nearest, to sizes": "x=F[B,3,8,6]: F.interpolate(x, size=(5, 13)).exp()",
    "nearest in 1d and 3d": "x=F[B,3,4,5,2]: F.interpolate(x, size=(6, 10, 3)) + F.interpolate(x[..., 0, 0], size=6)[..., None, None]",
    "nearest-exact": "x=F[B,3,8,6]: F.interpolate(x * 2, scale_factor=0.5, mode='nearest-exact')",
    "bilinear": "x=F[B,3,4,6]: F.interpolate(x, scale_factor=2, mode='bilinear') + 1",
    "bilinear, align_corners": "x=F[B,3,8,6]: F.interpolate(x, size=(5, 11), mode='bilinear', align_corners=True).exp()",
    "linear": "x=F[B,3,8]: F.interpolate(x * 2, size=13, mode='linear')",
    "trilinear": "x=F[B,2,3,4,5]: F.interpolate(x, size=(5, 4, 7), mode='trilinear') * 2",
    "bicubic": "x=F[B,2,5,4]: F.interpolate(x, size=(7, 9), mode='bicubic') * 2",
    "named sizes": "x=F[B,3,B,7]: F.interpolate(x * 2, size=(x.shape[2], 10), mode='bilinear')",
}
FAMILIES = {
    f"{family}: {name}": text
    for family, table in (
        ("pointwise", POINTWISE),
        ("views", VIEWS),
        ("reductions", REDUCTIONS),
        ("norms", NORMS),
        ("products", PRODUCTS),
        ("scans", SCANS),
        ("losses", LOSSES),
        ("indexing", INDEXING),
        ("attention", ATTENTION),
        ("convolutions", CONVOLUTIONS),
        ("pooling", POOLING),
        ("resampling", RESAMPLING),
    )
    for name, text in table.items()
}
"""All operations by family and name."""

LEFT_TO_TORCH = {
    "convolution of integers": ("i=i64[B,2,5], w=i64[3,2,2]: F.conv1d(i * 2, w)", "conv1d"),
    "max pooling indices": (
        "x=F[B,3,6,5]: F.max_pool2d(x * 2, 2, return_indices=True)[1]",
        "max_pool2d_with_indices",
    ),
    "topk": ("x: torch.topk(x * 2, 2)[0]", "topk"),
    "sorting": ("x: torch.sort(x * 2)[0]", "sort"),
    "scan with indices": ("x: torch.cummax(x * 2, -1)[0]", "cummax"),
    "scatter": ("x, i=i64[B,6,7]@0..6: torch.zeros_like(x).scatter(2, i, x * 2)", "scatter"),
    "rare functions": ("x: torch.special.zeta(x.abs() + 2, 3) * 2", "special_zeta"),
}
"""Operations that stay torch calls while their surroundings are fused: good library calls and rare functions."""


def source(text: str, dtype: str) -> str:
    """Source of the user's file for ``inputs: expression``."""
    head, expression = text.split(": ", 1)
    inputs = [item if "=" in item else f"{item}=F[B,6,7]" for item in re.split(r",\s*(?![^\[]*\])", head)]
    inputs = [re.sub(r"=F\[", f"={dtype}[", item) for item in inputs]
    names = ", ".join(item.split("=")[0] for item in inputs)
    return (
        "import torch\nimport torch.nn.functional as F\n\n"
        f"# mtmc: {' '.join(inputs)}{' B=5' if 'B' in head or 'x' in head.split(', ') else ''}\ndef f({names}):\n    return {expression}\n"
    )
