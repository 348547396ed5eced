"""Checkpoints as an attacker would make them: the manifest is anything, and its checksum fits."""

import json

import torch
import xxhash

import tierstep

from training_runs import OPTIONS, make_parameters


def start(tiers, seed=0):
    parameters = make_parameters(seed)
    model = torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in parameters.items()})
    return parameters, model, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers)


def refit(folder, manifest):
    """Write a manifest with a checksum that fits."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    (folder / "manifest.json").write_text(json.dumps(body))
