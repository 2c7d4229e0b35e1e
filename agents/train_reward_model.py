"""Train a reward model on comparisons of replies, in one file: what `gym-rm train` does, step by step.

    gym-rm agent train_reward_model data.train=pairs.jsonl data.validation_share=0.1 \\
        model.path=Qwen/Qwen3-0.6B model.new_head=true
    torchrun --nproc-per-node 8 -m gym_rm agent train_reward_model qwen3_0.6b data.train=pairs.jsonl batch.fsdp=true

A step learns from `batch.batch_size` comparisons. Each one is a prompt with its replies, and all of them run as token
trees, in which a prompt is computed once for all of its replies: once forward and once backward. `Trainer` owns the
model, the order of the data and the optimizer; `gym_rm.training.losses` are the losses; the rest is here.
"""

from __future__ import annotations

import sys

import gym_rm
from gym_rm.config import load_config, settings_file
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.training.trainer import Trainer


def main(arguments: list[str]) -> None:
    files = [each for each in arguments if "=" not in each]
    file = settings_file(files[0], "rm") if files else None
    settings = load_config(RewardModelTraining, file, [each for each in arguments if "=" in each])
    # Reads the model and the comparisons, checks that trees give the gradients of the plain forward, and resumes from
    # the last checkpoint in settings.output if there is one.
    trainer = Trainer(settings)
    if trainer.step == 0:
        trainer.evaluate()
    show = print if trainer.accelerator.is_main_process else lambda *text: None

    while trainer.step < len(trainer.steps):
        metrics = trainer.train_step()  # forward and backward over trees, clip, update
        show(f"step {trainer.step}/{len(trainer.steps)}: loss {metrics['loss']:.4f}, {metrics['seconds']:.2f} s")
        if trainer.step % settings.evaluate_every == 0 or trainer.step == len(trainer.steps):
            for name, measured in trainer.evaluate().items():  # also keeps the model if it is among the best
                show(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in measured.items()))
            trainer.save()  # a checkpoint to resume from
    finished = trainer.finish()  # a Hugging Face folder with a model card

    # The trained model is a reward model like any other.
    if trainer.accelerator.is_main_process:
        scorer = gym_rm.load_scorer(str(finished.model), **settings.model.reward_model_kwargs)
        show(f"{finished.model}: {scorer}")


if __name__ == "__main__":
    main(sys.argv[1:])
