"""Which kind of reward model? One file per answer."""

from gym_rm.engine.loading.checkpoint import Checkpoint, load_checkpoint
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.kinds.encoder import EncoderRewardModel
from gym_rm.engine.loading.families import FAMILIES, KINDS, Family
from gym_rm.engine.kinds.generative import GenerativeRewardModel
from gym_rm.engine.kinds.implicit import ImplicitRewardModel
from gym_rm.engine.kinds.make import make_reward_model
from gym_rm.engine.loading.trial import check_layout, choose_layout, longest_shared
from gym_rm.engine.kinds.multi_head import GatedRewardModel, MultiHeadRewardModel, Objectives
from gym_rm.engine.kinds.pair_encoder import PairEncoderRewardModel
from gym_rm.engine.kinds.process import ProcessRewardModel
from gym_rm.engine.kinds.reward_model import RewardModel

__all__ = [
    "FAMILIES",
    "KINDS",
    "Checkpoint",
    "DecoderRewardModel",
    "EncoderRewardModel",
    "Family",
    "GatedRewardModel",
    "GenerativeRewardModel",
    "ImplicitRewardModel",
    "MultiHeadRewardModel",
    "Objectives",
    "PairEncoderRewardModel",
    "ProcessRewardModel",
    "RewardModel",
    "check_layout",
    "choose_layout",
    "load_checkpoint",
    "longest_shared",
    "make_reward_model",
]
