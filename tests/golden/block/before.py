import torch


# mtmc: emissions=f32[B,T,N] transitions=f32[N,N] B=4 T=64 N=24
def viterbi(emissions, transitions):
    score = emissions[:, 0]
    history = []
    for t in range(1, emissions.shape[1]):
        best, index = (score.unsqueeze(2) + transitions).max(dim=1)
        score = best + emissions[:, t]
        history.append(index)
    return score, torch.stack(history, dim=1)
