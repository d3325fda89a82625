"""What is right where trimtab differs from a system, and what the system does: float64 loops over plain lists.

Without a line of trimtab. The functions of an entry take ``theirs``: the system's own values instead of the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapt.shared import Case

Rows = list[list[float]]
Values = dict[tuple[str, ...], Any]
LARGEST = {"float32": 88.72283905206835, "float64": 709.782712893384}  # of a logarithm whose number is finite
MARGIN = 10.0  # nats below it, where trimtab's ratios saturate


def rows(case: Case, key: str) -> Rows:
    return [[float(x) for x in row] for row in case.raw(key)]


def exp(x: float) -> float:
    return math.inf if x > LARGEST["float64"] else math.exp(x)


def kept(mask: Rows) -> list[list[int]]:
    """Positions of each row's valid tokens."""
    return [[t for t, m in enumerate(row) if m] for row in mask]


def log_ratios(case: Case, numerator: str, denominator: str, mask: Rows) -> list[float]:
    """Sums over each row's valid tokens."""
    a, b = rows(case, numerator), rows(case, denominator)
    return [sum(a[i][t] - b[i][t] for t in at) for i, at in enumerate(kept(mask))]


def importance(case: Case, numerator: str, denominator: str, mask: Rows, level: str, clamp: float = math.inf) -> Rows:
    """exp of the log-ratio of a token, of a row's sum, or of its mean, brought to +-clamp."""
    a, b, sums = rows(case, numerator), rows(case, denominator), log_ratios(case, numerator, denominator, mask)
    found = [[0.0] * len(row) for row in mask]
    for i, at in enumerate(kept(mask)):
        for t in at:
            x = {"token": a[i][t] - b[i][t], "sequence": sums[i], "geometric": sums[i] / len(at)}[level]
            found[i][t] = exp(max(-clamp, min(clamp, x)))
    return found


def by_mean(weights: Rows, counted: list[float]) -> Rows:
    mean = math.fsum(counted) / len(counted) if counted else 1.0
    return [[w / mean for w in row] for row in weights]


@dataclass(frozen=True)
class Clipped:
    """PPO's loss of a token, with a dual clip, and its derivative by the log of the ratio."""

    low: float
    high: float
    dual: float | None = None

    def at(self, log_ratio: float, advantage: float) -> tuple[float, float]:
        r = exp(log_ratio)
        free, bounded = -advantage * r, -advantage * min(max(r, 1 - self.low), 1 + self.high)
        loss, slope = (free, free) if free >= bounded else (bounded, 0.0)
        if self.dual is not None and advantage < 0 and loss > -advantage * self.dual:
            return -advantage * self.dual, 0.0
        return loss, slope


def token_mean(
    case: Case, current: str, anchor: str, mask: Rows, advantages: Rows, weights: Rows, clipped: Clipped, divisor: float
) -> tuple[float, Rows, Rows]:
    """Loss, gradient and weighted loss of each token of sum(weight * PPO) / divisor."""
    th, old = rows(case, current), rows(case, anchor)
    gradient, each = ([[0.0] * len(row) for row in mask] for _ in range(2))
    for i, at in enumerate(kept(mask)):
        for t in at:
            loss, slope = clipped.at(th[i][t] - old[i][t], advantages[i][t])
            each[i][t], gradient[i][t] = weights[i][t] * loss, weights[i][t] * slope / divisor
    return math.fsum(x for row in each for x in row) / divisor, gradient, each


# -- one function a difference -----------------------------------------------------------------------------------------


def nemo_rl_overflow(case: Case, theirs: bool = False) -> Values:
    """A ratio beyond what the dtype holds saturates: at the bound of its truncation, else at e^10 below the largest
    number. Theirs: it is 0 (or the lower bound), and so is the weight of a KL term."""
    config, mask = case.config, nemo_rl_mask(case)
    guard = 1e-8 if theirs else 0.0
    by_token = config["token_level_loss"]
    divisor = guard + case.raw("global_valid_toks" if by_token else "global_valid_seqs")
    policy, kl = nemo_rl_policy(case, mask, guard), nemo_rl_kl(case, mask, theirs)
    weights = nemo_rl_weights(case, theirs)
    loss, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, at in enumerate(kept(mask)):
        coefficient = 1 / divisor if by_token else 1 / (len(at) + guard) / divisor if at else 0.0
        for t in at:
            value, slopes = policy(i, t)
            loss += coefficient * (weights[i][t] * value + kl[i][t][0])
            gradient[i][t] += coefficient * kl[i][t][1]
            for u, slope in slopes.items():
                gradient[i][u] += coefficient * weights[i][t] * slope
    nll, of_rows = config["positive_example_nll_weight"], case.data["inputs"].get("rewards")
    if nll and of_rows is not None:
        positive = [(i, t) for i, at in enumerate(kept(mask)) for t in at if float(of_rows[i]) > 0]
        for i, t in positive:
            share = nll / (len(positive) + guard)
            loss -= share * rows(case, "curr_logprobs")[i][t]
            gradient[i][t] -= share
    return {("loss",): loss, ("metrics", "loss"): loss, ("grad_curr_logprobs",): gradient}


def nemo_rl_mask(case: Case) -> Rows:
    return [[m * s for m in row] for row, s in zip(rows(case, "token_mask"), case.raw("sample_mask"), strict=True)]


def bounded_ratio(case: Case, log_ratio: float, theirs: bool) -> float:
    """exp. Theirs: 0 where it overflows the case's dtype or is NaN. Ours: saturates 10 nats below, NaN is d = 0."""
    largest = LARGEST[case.data["dtype"]]
    if theirs:
        return exp(log_ratio) if log_ratio <= largest else 0.0
    return 1.0 if math.isnan(log_ratio) else exp(min(log_ratio, largest - MARGIN))


def nemo_rl_weights(case: Case, theirs: bool) -> Rows:
    """Weights prev/generation of each token, truncated; 1 without a correction."""
    config, mask = case.config, nemo_rl_mask(case)
    if not config["use_importance_sampling_correction"]:
        return [[1.0] * len(row) for row in mask]
    kind, by_row = config["truncated_importance_sampling_type"], config["sequence_level_importance_ratios"]
    kind = None if config["truncated_importance_sampling_ratio"] is None else kind
    a, b = rows(case, "prev_logprobs"), rows(case, "generation_logprobs")
    d = [[x - y for x, y in zip(*pair, strict=True)] for pair in zip(a, b, strict=True)]
    sums = [sum(0.0 if math.isnan(d[i][t]) and not (theirs and by_row) else d[i][t] for t in at)
            for i, at in enumerate(kept(mask))]  # fmt: skip
    low, high = config["truncated_importance_sampling_ratio_min"] or 0.0, config["truncated_importance_sampling_ratio"]
    found = [[0.0] * len(row) for row in mask]
    for i, at in enumerate(kept(mask)):
        for t in at:
            w, missing = bounded_ratio(case, sums[i] if by_row else d[i][t], theirs), math.isnan(d[i][t])
            exempt = missing and not (theirs or by_row)  # none of our bounds looks at a missing token
            if kind == "seq-mask-tis":
                finite = math.fsum(d[i][u] for u in at if math.isfinite(d[i][u]))  # the others are 0 to them
                w = w if low <= exp((finite if theirs else sums[i]) / len(at)) <= high else 0.0
            elif kind == "tis" and not exempt:
                w = min(max(w, low), high)
            elif kind == "icepop" and not exempt:
                w = w if low <= w <= high else 0.0
            found[i][t] = w
    return found


def nemo_rl_policy(case: Case, mask: Rows, guard: float) -> Callable[[int, int], tuple[float, dict[int, float]]]:
    """Loss of a token and its derivatives by the log-probs of its row's tokens, before weights."""
    config, th, advantage = case.config, rows(case, "curr_logprobs"), rows(case, "advantages")
    forced, at = config["force_on_policy_ratio"], kept(mask)
    old = th if forced else rows(case, "prev_logprobs")
    low, high = config["ratio_clip_min"], config["ratio_clip_max"]
    clipped = Clipped(low, high, config["ratio_clip_c"])

    def policy(i: int, t: int) -> tuple[float, dict[int, float]]:
        if config["disable_ppo_ratio"] and not forced:
            return -advantage[i][t] * th[i][t], {t: -advantage[i][t]}
        x, share = th[i][t] - old[i][t], {t: 1.0}
        if config["sequence_level_importance_ratios"] and not forced:
            count = len(at[i]) + guard
            x, share = math.fsum(th[i][u] - old[i][u] for u in at[i]) / count, dict.fromkeys(at[i], 1 / count)
        if config["use_cispo"]:
            factor = -advantage[i][t] * min(max(exp(x), 1 - low), 1 + high)
            return factor * th[i][t], {t: factor}
        loss, slope = clipped.at(x, advantage[i][t])
        return loss, {u: slope * part for u, part in share.items()}

    return policy


def nemo_rl_kl(case: Case, mask: Rows, theirs: bool) -> list[list[tuple[float, float]]]:
    """The KL term of a token and its derivative: w k(x), x within the input clamp, the whole within the output clamp.

    w is 1, or current/generation, with its gradient; beyond the input clamp neither has one.
    """
    config = case.config
    coefficient = 0.0 if config["use_kl_in_reward"] else config["reference_policy_kl_penalty"]
    found = [[(0.0, 0.0)] * len(row) for row in mask]
    if not coefficient:
        return found
    th, rollout = rows(case, "curr_logprobs"), rows(case, "generation_logprobs")
    reference = rows(case, "reference_policy_logprobs")
    most, ceiling = config["kl_input_clamp_value"] or math.inf, config["kl_output_clamp_value"] or math.inf
    largest = LARGEST[case.data["dtype"]] - (0 if theirs else MARGIN)
    for i, at in enumerate(kept(mask)):
        for t in at:
            y = th[i][t] - reference[i][t]
            x, inside = min(max(y, -most), most), float(abs(y) <= most)
            k, slope = {
                "k1": (x, 1.0), "k2": (x * x / 2, x), "k3": (exp(-x) - 1 + x, 1 - exp(-x))
            }[config["reference_policy_kl_type"]]  # fmt: skip
            z = th[i][t] - rollout[i][t] if config["use_on_policy_kl_approximation"] else 0.0
            w, live = bounded_ratio(case, z, theirs), float(z <= largest or (math.isnan(z) and not theirs))
            value, derivative = w * k, inside * w * (slope + live * k)
            if abs(value) > ceiling:
                value, derivative = math.copysign(ceiling, value), 0.0
            if theirs and not z <= largest:
                derivative = math.nan  # of the exp that was turned into 0: 0 times inf
            found[i][t] = coefficient * value, coefficient * derivative
    return found


def luspo(case: Case, theirs: bool = False) -> Values:
    """Mean over rows of the sum over tokens of weight * loss (+ beta KL): padding has no share in it.

    Theirs: the mean over rows and columns, padding too, of weight * loss * tokens of the row.
    """
    config = case.config
    if theirs and (config["beta"] or config["importance_sampling_level"] == "token"):
        return {}
    if config["use_bias_correction_kl"] or config["off_policy_mask_threshold"] or config["top_entropy_quantile"] != 1:
        return {}
    mask, th = rows(case, "completion_mask"), rows(case, "per_token_logps")
    if case.has("tool_mask"):
        mask = [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(mask, rows(case, "tool_mask"), strict=True)]
    old, by_token = rows(case, "old_per_token_logps"), config["importance_sampling_level"] == "token"
    sums = log_ratios(case, "per_token_logps", "old_per_token_logps", mask)
    weights, clipped = trl_weights(case, mask), Clipped(config["epsilon"], config["epsilon_high"])
    divisor = len(mask) * config["current_gradient_accumulation_steps"]
    terms, gradient = [], [[0.0] * len(row) for row in mask]
    for i, at in enumerate(kept(mask)):
        advantage, valid = case.raw("advantages")[i], set(at)
        for t in at:
            x = th[i][t] - old[i][t] if by_token else sums[i] / len(at)
            loss, slope = clipped.at(x, advantage)
            share = weights[i][t] if by_token else math.fsum(weights[i][u] for u in at) / len(at)
            if theirs:  # padding has the log-ratio 0 and so a weight of 1
                share = math.fsum(w if u in valid else 1.0 for u, w in enumerate(weights[i])) / len(weights[i])
            terms.append(share * loss)
            gradient[i][t] = slope * share / divisor
            if config["beta"]:
                y = th[i][t] - case.raw("ref_per_token_logps")[i][t]
                terms.append(config["beta"] * (exp(-y) - 1 + y))
                gradient[i][t] += config["beta"] * (1 - exp(-y)) / divisor
    return {("loss",): math.fsum(terms) / divisor, ("grad_per_token_logps",): gradient}


def trl_weights(case: Case, mask: Rows) -> Rows:
    mode = case.config["vllm_importance_sampling_mode"]
    if not mode:
        return [[1.0] * len(row) for row in mask]
    level, _, action = mode.partition("_")
    low = case.config["clip_min"] or 0.0
    high = math.inf if case.config["clip_max"] is None else case.config["clip_max"]
    raw = importance(case, "old_per_token_logps", "sampling_per_token_logps", mask, level)
    if action == "mask":
        return [[w if low <= w <= high else 0.0 for w in row] for row in raw]
    return [[min(max(w, low), high) for w in row] for row in raw]


def verl_overflow(case: Case) -> Values:
    """Weights of a batch that holds huge ratios: bounded, or 0 outside of the bounds; nothing is rejected by them."""
    config, mask = case.config, rows(case, "response_mask")
    if config.get("rollout_rs") or config.get("rollout_is_batch_normalize"):
        return {}
    low, _, high = str(config["rollout_is_threshold"]).rpartition("_")
    upper = float(high)
    raw = importance(case, "old_log_prob", "rollout_log_prob", mask, config["rollout_is"], clamp=20.0)
    weights = [[(w if float(low) <= w <= upper else 0.0) if low else min(w, upper) for w in row] for row in raw]
    return {("weights",): weights, ("mask",): mask}


def nothing_valid(case: Case) -> Values:
    """Of a batch without a valid token nothing is kept."""
    return {("mask",): [[0.0] * len(row) for row in case.raw("response_mask")]}


def miles_normalised(case: Case, theirs: bool = False) -> Values:
    """The mean is over what can enter a loss: weights inside their own bounds, responses with a token.

    Theirs: over all tokens; of rows, over all of them, with 0 for one without a token.
    """
    config, mask, level = case.config, rows(case, "loss_masks"), case.config["tis_level"]
    high = config["tis_upper_bound"]
    low = 1 / high if config["tis_lower_bound"] is None else config["tis_lower_bound"]
    raw = importance(case, "train_log_probs", "rollout_log_probs", mask, level, clamp=20.0)
    floor, ceiling = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[config["tis_mode"]]
    weights = [[min(max(w, floor), ceiling) if m else 0.0 for w, m in zip(*pair, strict=True)]
               for pair in zip(raw, mask, strict=True)]  # fmt: skip
    each = [[weights[i][t] for t in at] for i, at in enumerate(kept(mask))]
    if level != "token":
        each = [(row or [0.0] if theirs else row)[:1] for row in each]
    rejects = config["tis_mode"] == "mask" and not theirs
    counted = [w for row in each for w in row if not rejects or low <= w <= high]
    return {("weights",): by_mean(weights, counted)}


def areal_clamp(case: Case, theirs: bool = False) -> Values:
    """A row's weight is clamped to the bounds. Theirs: only if its largest ratio of a token is outside of them."""
    config, rule = case.config, case.config["rejection_sampling"]
    if config["importance_sampling_level"] != "token" or case.has("cu_seqlens"):
        return {}
    mask = rows(case, "loss_mask")
    raw = importance(case, "proximal_logprobs", "old_logprobs", mask, "geometric")
    of_tokens = importance(case, "proximal_logprobs", "old_logprobs", mask, "token")
    weights = []
    for i, row in enumerate(raw):
        spared = theirs and rule["lower"] <= max((w for w in of_tokens[i] if w), default=1.0) <= rule["upper"]
        weights.append([w if spared or not m else min(max(w, rule["lower"]), rule["upper"])
                        for w, m in zip(row, mask[i], strict=True)])  # fmt: skip
    count = sum(map(sum, mask))
    touched = sum(w != v for a, b in zip(weights, raw, strict=True) for w, v in zip(a, b, strict=True))
    high = config["eps_clip"] if config["eps_clip_higher"] is None else config["eps_clip_higher"]
    loss, gradient, each = token_mean(
        case, "logprobs", "proximal_logprobs", mask, rows(case, "advantages"), weights,
        Clipped(config["eps_clip"], high, config["c_clip"]), count or 1,
    )  # fmt: skip
    return {
        ("weights",): weights,
        ("stat", "behave_imp_weight"): weights,
        ("loss",): loss,
        ("grad_logprobs",): gradient,
        ("stat", "loss"): each,
        ("filtered_fraction",): touched / max(count, 1),
        ("stat", "filtered_fraction"): touched / max(count, 1),
    }


def unpacked_gspo(case: Case) -> Values:
    """Each list is a sequence; how they are stored does not change the loss."""
    config = case.config
    mask = [[float(label != -100) for label in row[1:]] for row in case.raw("labels")]
    th = rows(case, "new_logprobs_shifted")
    shifted = {
        key: [row[1:] for row in case.raw(key)] for key in ("old_logprobs", "advantages", "group_tokens", "overflow")
    }
    total = 0.0
    for i, at in enumerate(kept(mask)):
        if not at:
            continue
        x = math.fsum(th[i][t] - shifted["old_logprobs"][i][t] for t in at) / len(at)
        loss, _ = Clipped(config["epsilon_low"], config["epsilon_high"]).at(x, shifted["advantages"][i][at[0]])
        total += loss * math.fsum(_token_weight(config, shifted, i, t) for t in at)
    return {("loss",): total}


def _token_weight(config: Mapping[str, Any], shifted: Mapping[str, Sequence[Sequence[float]]], i: int, t: int) -> float:
    weight = 1 / (shifted["group_tokens"][i][t] if config["group_normalization"] else config["batch_size"])
    return weight * (1 - shifted["overflow"][i][t]) if config["overlong_filtering"] else weight
