"""Strategies of Hypothesis for calls of the scripts."""

import itertools
import shlex
from dataclasses import dataclass, field

from hypothesis import strategies as st

from fuzzing.world import FAULTS, FILES, MADE, NANOGPT, OBSTACLES, SHAPE, STEPS


@dataclass
class Call:
    """A call of a script in a copy of the world, and what happens to the world before and during the call.

    damage   [(file, kind, a number that says where and how)], done in this order
    request  more arguments of Forks.run
    """

    script: str
    args: list
    damage: list = field(default_factory=list)
    request: dict = field(default_factory=dict)

    def __str__(self):
        lines = [f"damage of {file}: {kind} ({where})" for file, kind, where in self.damage]
        lines += [f"{name}: {value}" for name, value in self.request.items()]
        return "\n".join([*lines, f"python {self.script} {shlex.join(map(str, self.args))}"])


# -- flags and values --------------------------------------------------------------------------------------------------

READER = ["--prompt", "the ", "--device", "cpu"]
ODD = ["", " ", "x", "-1", "0", "1", "2", "7", "0.5", "1.0", "-0.0", "1e-320", "1e30", "1e39", "nan", "inf", "-inf"]
ODD += ["9" * 19, "9" * 309, "9" * 5000, "1_0", "٣", "1 ", "a\nb", "\x1b[2J", "é", "\udcff", "None", "True", "--seed"]
ODD += ["2147483647", "2147483648", "18446744073709551616", "FILE:", "FILE:data/train.bin", "FILE:nowhere", "out"]
ODD += ["/dev/null", "a" * 300, "cuda", "meta", "cpu:1", "-", "[1]", "{}"]
odd = st.sampled_from(ODD)
PROMPTS = ["the ", "O", "", "T" * 15, "T" * 16, "T" * 17, "T" * 60, "ünknown", "\n", "\r\n", "FILE:data/meta.json"]

# a flag that makes a call long gets small numbers, and otherwise only numbers that are refused at once
SAMPLE = {
    "--prompt": PROMPTS,
    "--max_new_tokens": ["0", "1", "5", "40", "-1", "x", "9" * 309],
    "--stop": ["e", "\n", "", "the", "\udcff"],
    "--temperature": ["0", "0.8", "2", "1e-9"],
    "--top_k": ["1", "5", "64", "1000"],
    "--top_p": ["0.1", "0.9", "1", "1e-9"],
    "--seed": ["0", "1337", "18446744073709551615"],
    "--overflow": ["stop", "slide"],
    "--num_samples": ["1", "2", "7", "0", "9" * 19],
    "--draft": ["ngram"],
    "--engine": ["torch", "onnx", "hf"],
    "--out_dir": ["out", "other", "out/previous"],
    "--ckpt": ["out/ckpt.pt", "out/last.pt", NANOGPT, "out/onnx/model.onnx", "out/hf", "data/meta.json", "out"],
    "--meta": ["meta.pkl", "data/meta.json", "out/ckpt.pt"],
    "--dtype": ["float32", "bfloat16", "float16", "float64"],
    "--device": ["cpu", "auto"],
}
SAMPLE |= dict.fromkeys(["--kv_cache", "--no-kv_cache", "--compile", "--verify", "--explain"])
TRAIN = {
    "--preset": ["cpu", "nanogpt-cpu", "lecture"],
    "--recipe": ["modern", "nanogpt"],
    "--init_from": ["scratch", "resume", "out/hf", "nowhere"],
    "--out_dir": ["out", "other", "data", "out/log.csv"],
    "--data_dir": ["data", "out"],
    "--eval_interval": ["1", "5", "100"],
    "--save_interval": ["1", "5"],
    "--log_interval": ["1", "7"],
    "--sample_interval": ["1", "5"],
    "--n_layer": ["1", "3", "0"],
    "--n_head": ["1", "4", "3"],
    "--n_kv_head": ["1", "2", "3"],
    "--n_embd": ["16", "8", "2147483647"],
    "--block_size": ["1", "2", "16", "33", "2147483647"],
    "--dropout": ["0.5", "0", "1"],
    "--bias": ["True", "False"],
    "--mlp_ratio": ["1", "0.1", "2.5", "1e9"],
    "--activation": ["gelu", "gelu_tanh", "swiglu"],
    "--pos_emb": ["learned", "rope"],
    "--norm_first": ["True", "False"],
    "--tie_weights": ["True", "False"],
    "--qk_norm": ["True", "False"],
    "--zero_init": ["True", "False"],
    "--ngram_targets": ["0", "1", "0.5"],
    "--mtp_weight": ["0", "0.3", "1e30"],
    "--optimizer": ["adamw", "muon"],
    "--batch_size": ["1", "3", "16", "2147483647"],
    "--gradient_accumulation_steps": ["1", "3"],
    "--max_iters": ["0", "1", "12", "15", "x", "-1", "9" * 19],
    "--learning_rate": ["1e-3", "0", "1e30"],
    "--muon_learning_rate": ["0.01", "0", "1e30"],
    "--min_lr": ["0", "1e-4", "1"],
    "--warmup_iters": ["0", "5", "100"],
    "--lr_decay_iters": ["1", "20"],
    "--weight_decay": ["0", "0.1", "1e30"],
    "--beta1": ["0", "0.9"],
    "--beta2": ["0", "0.999"],
    "--grad_clip": ["0", "1", "1e-9"],
    "--patience": ["0", "1", "3"],
    "--seed": ["0", "1337", "9223372036854775807"],
    "--threads": ["1", "2", "0"],
    "--dtype": ["float32", "bfloat16", "float16", "auto"],
    "--device": ["cpu", "auto"],
    "--plot": ["True"],
}
EXPORT = {
    "--format": ["onnx", "hf", "web"],
    "--out_dir": ["out", "other"],
    "--ckpt": SAMPLE["--ckpt"],
    "--meta": SAMPLE["--meta"],
    "--data_dir": ["data", "out", "nowhere"],
    "--int8": None,
    "--cacheless": None,
}
PREPARE = {"--input": ["text", "out/ckpt.pt", "data", "nowhere"], "--data_dir": ["data", "other", "text"]}
PREPARE |= {"--url": ["", "x", "file:///etc/passwd", "http://127.0.0.1:9/x", "http://["], "--force": None}
BENCH = {
    "--shapes": ["1/1/8/16", "1/2/8/8", "0/1/8/16", "1/3/8/16", "1/1/8", "1/1/8/16/3"],
    "--batch": ["1", "2", "0"],
    "--threads": ["1", "0"],
    "--csv": ["rows.csv", "out", "nowhere/rows.csv"],
    "--json": ["rows.json", "data"],
    "--variants": ["eager", "uncached", "nothing"],
    "--repeats": ["1", "0"],
}
ENVIRONMENTS = [{name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") for value in ("0", "1", "x", "")]
ENVIRONMENTS += [{"MASTER_ADDR": "localhost"}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "99999999"}]
ENVIRONMENTS += [{"CC": "false"}, {"CC": "/nowhere"}, {"TMPDIR": "/nowhere"}, {"HOME": "/nowhere"}, {"COLUMNS": "1"}]
STREAMS = [{number: to} for number in (0, 1, 2) for to in (None, "/dev/full")] + [{0: None, 1: None, 2: None}]
LIMITS = [100, 20_000, 60_000]  # bytes
where = st.integers(0, 2**31 - 1)


def some_flags(table):
    """A strategy for the arguments of up to four flags of a table, mostly with values that make sense."""

    def values(name):
        if table[name] is None:
            return st.just([name])
        usual = st.sampled_from(table[name])
        long = name in ("--max_new_tokens", "--num_samples", "--max_iters", "--n_layer", "--repeats", "--batch")
        return (usual if long else st.one_of(usual, usual, odd)).map(lambda value: [f"{name}={value}"])

    one = st.sampled_from(sorted(table)).flatmap(values)
    return st.lists(one, max_size=4).map(lambda lists: list(itertools.chain(*lists)))


def base(script, *args, faults=2):
    """A strategy for calls of a script: some of its flags after `args`, and damage of up to `faults` files."""
    damaged = st.tuples(st.sampled_from(FILES), st.sampled_from(FAULTS), where)
    in_the_way = st.tuples(st.sampled_from(MADE), st.sampled_from(OBSTACLES), where)
    damage = st.lists(st.one_of(damaged, damaged, in_the_way), max_size=faults)
    flags = some_flags(TABLES[script])
    return st.builds(lambda more, damage: Call(script, [*args, *more], damage), flags, damage)


TABLES = {"sample.py": SAMPLE, "train.py": TRAIN, "export.py": EXPORT, "data/prepare.py": PREPARE, "bench.py": BENCH}
TRAINING = [*SHAPE, "--max_iters", str(STEPS)]
RESUMING = ["--init_from", "resume", "--max_iters", str(STEPS + 3)]
READING = {
    "out/ckpt.pt": ["sample.py", *READER],
    "out/last.pt": ["train.py", *RESUMING],
    "out/log.csv": ["train.py", *RESUMING],
    "data/meta.json": ["train.py", *RESUMING],
    "data/train.bin": ["train.py", *RESUMING],
    "data/val.bin": ["train.py", *RESUMING],
    "out/onnx/model.onnx": ["sample.py", *READER, "--engine", "onnx"],
    NANOGPT: ["sample.py", *READER, "--ckpt", NANOGPT, "--meta", "meta.pkl"],
    "meta.pkl": ["sample.py", *READER, "--ckpt", NANOGPT, "--meta", "meta.pkl"],
}


def reading_damage():
    """A strategy for calls that read a damaged file."""

    def call(file, kind, place, engine):
        script, *args = READING.get(file, engine)
        return Call(script, args, [(file, kind, place)])

    readers = [["sample.py", *READER, "--engine", "hf"]]
    readers += [["train.py", *TRAINING, "--init_from", "out/hf", "--out_dir", "other", "--max_iters", "1"]]
    return st.builds(call, st.sampled_from(FILES), st.sampled_from(FAULTS), where, st.sampled_from(readers))


def with_fault_of_the_machine(calls):
    """A strategy for the same calls with closed streams, a full disk, or an odd environment."""
    faults = [{"streams": each} for each in STREAMS] + [{"limit": each} for each in LIMITS]
    several = st.lists(st.sampled_from(ENVIRONMENTS), min_size=1, max_size=4)
    environment = several.map(lambda each: {"env": dict(itertools.chain(*map(dict.items, each)))})
    request = st.one_of(st.sampled_from(faults), environment)
    return st.builds(lambda call, request: Call(call.script, call.args, call.damage, request), calls, request)


def killed(calls):
    """A strategy for the same calls, killed before some change of a file or after some time."""
    at = st.integers(1, 40).map(lambda n: {"kill_at": n})
    after = st.floats(0.01, 1).map(lambda seconds: {"kill_after": seconds})
    return st.builds(lambda call, kill: Call(call.script, call.args, [], kill), calls, st.one_of(at, at, after))


KILLABLE = [
    Call("train.py", [*TRAINING, "--save_interval", "3", "--eval_interval", "4", "--log_interval", "1"]),
    Call("train.py", [*TRAINING, "--init_from", "resume", "--max_iters", str(STEPS + 6), "--save_interval", "1"]),
    Call("data/prepare.py", ["--input", "text", "--data_dir", "data"]),
]
EXPORTS = [Call("export.py", ["--format", "hf"]), Call("export.py", ["--format", "onnx"])]
kills = killed(st.sampled_from(KILLABLE))
plain = st.one_of(
    base("sample.py", *READER, faults=0),
    base("sample.py", "--device=cpu", faults=1),
    base("train.py", *TRAINING, faults=1),
    base("train.py", *TRAINING, "--init_from=resume", f"--max_iters={STEPS + 2}", faults=1),
    base("data/prepare.py", "--input=text", "--data_dir=data", faults=1),
)
bench = "--shapes=1/1/8/16 --variants=eager --repeats=1".split()
slow = st.one_of(
    base("export.py", "--format=onnx", faults=1), killed(st.sampled_from(EXPORTS)), base("bench.py", *bench, faults=0)
)
quick = st.one_of(plain, plain, reading_damage(), reading_damage(), with_fault_of_the_machine(plain), kills)
calls = st.integers(0, 39).flatmap(lambda n: quick if n else slow)  # one of forty exports
