"""The published experiments: every published figure beside a simulated one, with an honest word on each."""

from libra.pipeline.simulate.paper.experiments import Paper, experiments
from libra.pipeline.simulate.paper.judged import Figure, judged
from libra.pipeline.simulate.paper.published import PUBLISHED, Published

__all__ = ["PUBLISHED", "Figure", "Paper", "Published", "experiments", "judged"]
