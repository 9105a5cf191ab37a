"A method for the CIS book: a sum of reference and condition with one learned weight for each dimension of both."

from dataclasses import dataclass

import numpy as np
import torch

from cis_nb.api import Plugin, TrainingConfig
from cis_nb.backbones.features import TextMemory, l2_normalize
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.cirr import load_cirr
from cis_nb.data.roots import cirr_root
from cis_nb.methods.baselines import FeatureMethod
from cis_nb.methods.contrastive import info_nce
from cis_nb.training.validation import RetrievalValidation, check_backbone, read_net, write_net
from pydantic import Field


class Sum(torch.nn.Module):
    def __init__(self, D: int):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(2, D))

    def forward(self, ref, cond):  # (B,D), (B,D) -> (B,D)
        ref, cond = (l2_normalize(x.to(self.weights.device)) for x in (ref, cond))
        return l2_normalize(self.weights[0] * ref + self.weights[1] * cond)


@dataclass(kw_only=True)
class LearnedSum(FeatureMethod):
    net: Sum

    @torch.no_grad()
    def encode_query(self, ref, texts):
        return self.net(ref, self.read(texts))


class LearnedSumTraining(RetrievalValidation):
    name = 'learned_sum'

    def __init__(self, backbone, train, val, config):
        self.backbone, self.tasks, self.config, self.net = backbone, {'cirr': val}, config, Sum(backbone.D)
        features, queries = train.source.features(backbone), train.as_queries()
        targets = [features.index[t[0]] for t in train.queries.targets]
        self.ref = torch.tensor(np.asarray(features.array[[features.index[r] for r in queries.references]])).float()
        self.cond = TextMemory(backbone)([text for (text,) in queries.texts])
        self.target = torch.tensor(np.asarray(features.array[targets])).float()
        self.modules, self.data = {'sum': self.net}, range(len(queries))

    def prepare(self, ids, rng):
        return self.ref[ids], self.cond[ids], self.target[ids]

    def loss(self, batch):
        ref, cond, target = batch
        query = self.net(ref, cond)
        return info_nce(query, target.to(query.device), torch.tensor(self.config.temperature))

    def method(self):
        return LearnedSum(name='learned_sum', title='Learned sum', backbone=self.backbone, net=self.net)

    def save(self, folder):
        about = dict(backbone=self.backbone.name, pretrained=self.config.pretrained, D=self.backbone.D)
        write_net(folder, 'sum', self.net, about | dict(fingerprint=self.backbone.fingerprint))

    def load(self, folder):
        self.net.load_state_dict(read_sum(folder)[0].state_dict())


def read_sum(run):
    return read_net(run, 'sum', lambda about: Sum(about['D']), 'no run of the learned sum')


class LearnedSumConfig(TrainingConfig):
    cirr: int = Field(200, ge=1, description="scenes of the world's CIRR, which trains and validates")
    temperature: float = Field(20.0, gt=0, description='factor of the cosines in the loss')


class LearnedSumPlugin(Plugin):
    name, title, color, Config = 'learned_sum', 'Learned sum', '#7a4fbf', LearnedSumConfig

    def inputs(self, backbone, config):
        return [load_cirr(cirr_root(config.data, config.cirr), split).fingerprint for split in ('train', 'val')]

    def objective(self, backbone, config):
        train, val = (load_cirr(cirr_root(config.data, config.cirr), split) for split in ('train', 'val'))
        return LearnedSumTraining(backbone, train, val, config)

    def load(self, run, device='auto', backbone=None):
        net, about = read_sum(run)
        backbone = backbone or load_backbone(about['backbone'], about['pretrained'], device)
        check_backbone(backbone, about, run, 'this sum')
        return LearnedSum(name=self.name, title=self.title, backbone=backbone, net=net, run=run.name)
