"""Mixture of experts: a router sends each token to k of E networks.

    token --router--> a score for each expert --softmax, top k--> experts 3 and 0: 0.7 and 0.3
    output = 0.7 x expert3(token) + 0.3 x expert0(token)

E times the parameters of one network for the work of k. labkit.moe.MoE places experts on several
ranks, by two all_to_all each way. Shazeer et al., Outrageously Large Neural Networks: The
Sparsely-Gated Mixture-of-Experts Layer, ICLR 2017, section 2.
"""

import torch


def mixture_of_experts(x, router, experts, top_k):
    """Add the outputs of each token's top_k experts, weighted by the router. x: [tokens, width].

    router: [tokens, width] -> [tokens, experts]. experts: functions [some tokens, width] -> same.
    """
    weights, chosen = torch.softmax(router(x), -1).topk(top_k)  # both [tokens, top_k]
    if top_k > 1:  # with one expert the weight would always be 1, and the router would not learn
        weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        # the tokens that chose this expert, and its position among their top_k
        token, position = (chosen == number).nonzero(as_tuple=True)
        output = output.index_add(0, token, weights[token, position, None] * expert(x[token]))
    return output
