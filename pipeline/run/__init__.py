"""The run loop: admission, rollout, batches, training, publishing, evaluation; start and resume."""
