import triton
import triton.language as tl


@triton.jit
def rows_kernel(x_ptr, m_ptr, y_ptr, N, V, x_row, x_col, m_row, m_col, R: tl.constexpr, C: tl.constexpr):
    n = tl.program_id(0) * R + tl.arange(0, R)
    v = tl.arange(0, C)
    inside = (n[:, None] < N) & (v[None, :] < V)
    x = tl.load(x_ptr + n[:, None] * x_row + v[None, :] * x_col, inside, 0.0)
    m = tl.load(m_ptr + n[:, None] * m_row + v[None, :] * m_col, inside, 1)
    x = tl.where(m, -1e9, x)
    x = tl.where(v[None, :] < V, x, float("-inf"))
    x -= tl.max(x, 1)[:, None]
    p = tl.exp(x)
    p /= tl.sum(p, 1)[:, None]
    tl.store(y_ptr + n[:, None] * V + v[None, :], p, inside)


def masked_softmax(x, mask):
    N, V = x.shape
    y = x.new_empty([N, V])
    if N * V:
        rows_kernel[(triton.cdiv(N, 2),)](
            x, mask, y, N, V, *x.stride(), *mask.stride(), R=2, C=triton.next_power_of_2(V)
        )
    return y
