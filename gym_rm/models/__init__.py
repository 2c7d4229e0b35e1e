"""Which kind of reward model? One file per answer."""

from gym_rm.models.checkpoint import Checkpoint, load_checkpoint
from gym_rm.models.decoder import DecoderRewardModel
from gym_rm.models.encoder import EncoderRewardModel
from gym_rm.models.families import FAMILIES, KINDS, Family
from gym_rm.models.generative import GenerativeRewardModel
from gym_rm.models.implicit import ImplicitRewardModel
from gym_rm.models.kinds import make_reward_model
from gym_rm.models.layout import check_layout, choose_layout, longest_shared
from gym_rm.models.multi_head import GatedRewardModel, MultiHeadRewardModel, Objectives
from gym_rm.models.pair_encoder import PairEncoderRewardModel
from gym_rm.models.process import ProcessRewardModel
from gym_rm.models.reward_model import RewardModel

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
