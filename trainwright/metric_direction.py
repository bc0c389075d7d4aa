"""Whether a metric is better if it is lower or higher, as far as its name says."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["Direction", "direction_of"]

Direction = Literal["min", "max"]
_LEAST = re.compile(
    r"(?:^|[^a-z]|[a-z](?=loss))"
    r"(?:loss|error|err|mse|rmse|mae|mape|smape|nll|kl|perplexity|ppl|bpb|bpc|wer|cer|eer|ece|brier|fid|lpips)"
    r"(?:$|[^a-z])",
    re.IGNORECASE,
)
_GREATEST = re.compile(
    r"(?:^|[^a-z]|[a-z](?=accuracy|auroc|precision|recall))"
    r"(?:acc|accuracy|f1|fbeta|auc|auroc|auprc|ap|map|precision|recall|iou|miou|jaccard|dice|bleu|rouge[a-z0-9]*|meteor|r2|"
    r"score|top\d|hit|ndcg|mrr|mcc|kappa|specificity|sensitivity|psnr|ssim)"
    r"(?:$|[^a-z])",
    re.IGNORECASE,
)


def direction_of(name: str) -> Direction | None:
    """Return "min" or "max", or None if the name does not say which."""
    if _LEAST.search(name):
        return "min"
    return "max" if _GREATEST.search(name) else None
