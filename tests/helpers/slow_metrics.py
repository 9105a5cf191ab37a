"Ranks and average precision by the definition, one query at a time."


def slow_ranks(s, targets, valid):
    order = sorted(
        (i for i in range(len(s)) if valid[i]),
        key=lambda i: (-s[i], i in targets, -(targets.index(i) if i in targets else 0)),
    )
    return [order.index(t) + 1 for t in targets]


def slow_ap(hits, n_targets, k):
    found, total = 0, 0.0
    for rank, hit in enumerate(hits[:k], 1):
        if hit:
            found += 1
            total += found / rank
    return total / min(n_targets, k)
