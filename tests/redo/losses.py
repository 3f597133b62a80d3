"""A loss in a user's own file."""

from torch import nn

from forge_core.algorithms.losses import GRPOLoss


class OwnLoss(nn.Module):
    def forward(self, logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs):
        loss = GRPOLoss(beta=0.0, agg_type="token_mean")
        return loss(logits, target_ids, advantages, generator_logprobs, loss_mask)
