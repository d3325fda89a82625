"""PipelineRL: ``rl_step``; padded rows, or rows packed into one. Log-probs and entropies come from the logits."""

from __future__ import annotations

import torch
from adapt.shared import Case, Layout, Said, flat, layout, layout_of, metrics, total
from torch import Tensor

from trimtab.method import Coefficients, Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.peers import pipelinerl
from trimtab.peers.options import member
from trimtab.peers.pipelinerl import PolicyLoss
from trimtab.policy.logprob import LogitOptions, token_logprobs
from trimtab.spec import (
    Aggregate,
    Algo,
    AlgoSpec,
    KlEstimator,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    RatioLevel,
    TisMode,
)

NO_LABEL = -100


def said(case: Case) -> list[Said]:
    return _Step(case).said()


def method(case: Case) -> MethodSpec:
    config, kind = case.config, member(PolicyLoss, "policy_loss", case.config["policy_loss"])
    weighted, by_row = kind is PolicyLoss.reinforce, kind is PolicyLoss.gspo
    high = config["epsilon_high"]
    mis = MisSpec(
        tis_mode=TisMode.truncate if weighted else TisMode.off,
        tis_upper_bound=1 + high if weighted else None,
        log_ratio_clamp=None,
    )
    kl_coef, entropy_coef = _terms(case)
    spec = LossSpec(
        name=LossName.reinforce if weighted else LossName.ppo_clip,
        ratio_level=RatioLevel.sequence if by_row else RatioLevel.token,
        clip_low=config["epsilon_low"],
        clip_high=high,
        log_ratio_clamp=None,
        aggregate=Aggregate.sequence_sum,
        sum_constant=1.0,
        kl_coef=0.0 if by_row else kl_coef,  # gspo has the policy term alone
        kl_value=KlEstimator.k3,
        kl_gradient=KlEstimator.k3,
        kl_input_clamp=config["clamp_log_ratio_ref_new_value"],
        entropy_coef=0.0 if by_row else entropy_coef,
    )
    return MethodSpec(AlgoSpec(Algo.bypass), mis, spec)


def _terms(case: Case) -> tuple[float, float]:
    """Coefficients of the KL and of the entropy at this step."""
    config = case.config
    step, last = config["current_step"], config["max_step"]
    return (
        pipelinerl.linear_decay(step, last, config["kl_coef"], config["final_kl_coef"]),
        pipelinerl.linear_decay(step, last, config["entropy_bonus"], config["final_entropy_bonus"]),
    )


class _Step:
    """One call of ``rl_step``: token t is predicted at t - 1, so the first of each list has no log-prob."""

    def __init__(self, case: Case) -> None:
        self.case = case
        labels = self._shifted("labels")
        self.valid_N = flat(labels, torch.int64) != NO_LABEL
        self.lay = self._packed() if case.raw("is_packed") else layout(labels)

    def _shifted(self, key: str) -> list[list[float]]:
        return [row[1:] for row in self.case.raw(key)]

    def _tokens(self, key: str) -> Tensor:
        return flat(self._shifted(key), self.case.dtype)

    def _rows(self, key: str) -> Tensor:
        """One number a row, given at each of its tokens, valid or not."""
        return self.lay.per_row(self._tokens(key), torch.ones_like(self.valid_N))

    def _packed(self) -> Layout:
        """A row starts where the position is 0; the first one may start anywhere."""
        starts = [i for i, position in enumerate(self.case.raw("position_ids")[0]) if position == 0 or i == 0]
        ends = [*starts[1:], len(self.case.raw("position_ids")[0])]
        length_B = torch.tensor([end - max(start, 1) for start, end in zip(starts, ends, strict=True)])
        return layout_of(length_B)

    def scored(self) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, and each token's log-prob and entropy as functions of them."""
        logits = torch.tensor(self.case.raw("logits"), dtype=self.case.dtype, requires_grad=True)
        vocabulary = logits.shape[-1]
        current_N, entropy_N = token_logprobs(
            logits[:, :-1].reshape(-1, vocabulary),
            torch.eye(vocabulary, dtype=self.case.dtype),
            flat(self._shifted("input_ids"), torch.int64),
            options=LogitOptions(temperature=self.case.config["temperature"]),
            entropy=True,
        )
        assert entropy_N is not None
        return logits, current_N, entropy_N

    def given(self, weight_N: Tensor) -> Coefficients | None:
        """Weights of tokens where they are not all the same."""
        if not (self.case.config["group_normalization"] or self.case.config["overlong_filtering"]):
            return None
        weight_N = torch.where(self.valid_N, weight_N, 0.0)
        return Coefficients(weight_N, weight_N)

    def said(self) -> list[Said]:
        case, config, lay = self.case, self.case.config, self.lay
        kind = member(PolicyLoss, "policy_loss", config["policy_loss"])
        logits, current_N, entropy_N = self.scored()
        advantage_B, reward_B = self._rows("advantages"), self._rows("rewards")
        multiplied_B = advantage_B
        if kind is not PolicyLoss.gspo:
            multiplied_B = pipelinerl.policy_weights(
                advantage_B, reward_B,
                use_advantages=config["use_advantages"], relu_log_p_weights=config["relu_log_p_weights"],
            )  # fmt: skip
        weight_N = pipelinerl.token_weights(
            lay.row_N,
            batch_size=config["batch_size"],
            group_tokens_B=self._rows("group_tokens") if config["group_normalization"] else None,
            overflow_B=self._rows("overflow") if config["overlong_filtering"] else None,
            dtype=case.dtype,
        )
        inputs = Inputs(
            current_N=current_N,
            rollout_N=self._tokens("old_logprobs"),
            valid_N=self.valid_N,
            row_N=lay.row_N,
            length_B=lay.length_B,
            advantage_B=multiplied_B,
            reference_N=self._tokens("ref_logprobs"),
            entropy_N=entropy_N,
        )
        totals = Counts(1, config["batch_size"])
        result = evaluate(method(case), inputs, totals=totals, given=self.given(weight_N))
        (gradient,) = torch.autograd.grad(result.loss.total, logits)
        kl_coef, entropy_coef = _terms(case)
        logged = pipelinerl.step_metrics(
            current_N=current_N.detach(),
            rollout_N=inputs.rollout_N,
            reference_N=inputs.reference_N,
            valid_N=self.valid_N,
            row_N=lay.row_N,
            length_B=lay.length_B,
            advantage_B=advantage_B,
            reward_B=reward_B,
            entropy_N=entropy_N.detach(),
            weight_N=weight_N,
            loss=result.loss.total.detach(),
            kl_coef=kl_coef,
            entropy_bonus_coef=entropy_coef,
            labels_B=self._rows("num_labels"),
            input_size=len(flat(case.raw("input_ids"), torch.int64)),
            options=pipelinerl.Options(
                kind, config["epsilon_low"], config["epsilon_high"], config["clamp_log_ratio_ref_new_value"]
            ),
        )
        ess = [Said(("ess_restated",), logged.pop("rl/ess"))] if "rl/ess" in logged else []
        return [
            total(result),
            Said(("grad_logits",), gradient),
            *ess,
            *metrics(logged, "metrics"),
        ]
