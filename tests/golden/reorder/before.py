# mtmc: x=f32[M,N] column=f32[N,M] M=64 N=96
def add_transposed(x, column):
    return x + 2.0 * column.t()
