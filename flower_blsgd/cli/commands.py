"""The commands of ``blsgd``: where each one is, and its texts in the help."""

import re
from textwrap import indent
from typing import NamedTuple

GROUPS = {
    "train": ("run", "launch", "prepare"),
    "look": ("devices", "watch", "evaluate", "report"),
    "compare": ("calibrate", "plan", "compare", "reproduce"),
    "several machines": ("supernode",),
    "": ("completion",),
}
"""Names of the commands, grouped by purpose."""

_TEXTS = """\
run (main): train on the devices of this machine

Train a model with one process per device, each pinned to its device. Faster
devices take more steps, so that they do not wait. The results are written to
runs/<name>-<n>. Also runs any other Flower app.

# train on handwritten digits, on all cores
blsgd run -c digits -s epochs=5
# train on a GPU and on eight CPU cores
blsgd run -c cifar10-smoke --workers "1x cuda:0 fast; 1x cpu:0-7 slow"

launch (launch): train with your own script, which runs on every device

Run a training script on every device of this machine, and average its models.
The script calls flower_blsgd.join(model, optimizer), and trains until
session.done.

# train on two GPUs, until both together have trained on 500,000 samples
blsgd launch --workers "1x cuda:0 fast; 1x cuda:1" --samples 500000 train.py
# train for ten minutes on all devices; --lr is an option of the script
blsgd launch --seconds 600 train.py --lr 0.1

prepare (main): download and convert data first, so that runs start immediately

Download, check and convert the data of a task, once per machine. A run does
this itself if the data are not ready.

# prepare CIFAR-10
blsgd prepare -c cifar10-1c1g
# prepare your own images
blsgd prepare -s task=images -s data=photos

devices (main): list the devices of this machine, and the default workers

List the CPU cores and accelerators that this process may use, and the workers
of a specification; those of "auto" without --workers. Trains nothing.

# list the devices and the default workers
blsgd devices
# check a specification, and see which cores each worker gets
blsgd devices --workers "2x cpu fast; 1x cpu slow"

watch (watch): follow a run: curve, speeds, who waits, time left, failures

Show a run while it trains, in this or another terminal: its progress and
learning curve, who computes and who waits, and failures. Ends with the run, or
at Ctrl-C, which does not stop the run. Without a terminal, shows it once.

# follow the newest run
blsgd watch
# follow another one, also after its --resume
blsgd watch runs/digits-3

evaluate (main): test the model of a run on the whole test set

Load the model of a run, and test it on the whole test set.

# test the model of the newest run
blsgd evaluate runs/latest
# test it on the CPU, with data that have moved
blsgd evaluate runs/photos-1 --data /mnt/photos --device cpu

report (experiments): write an HTML page about a run or a comparison

Write an HTML page with the figures and pictures of a run, of a comparison, or
of a reproduction. The page is one file, which needs no network.

# write runs/latest/report.html
blsgd report runs/latest
# write the page of a comparison to another file
blsgd report runs/compare-digits --out page.html

calibrate (experiments): measure how fast each device trains

Measure the seconds per step of every worker, alone and together with the
others, and the time to send and average models. Print a line for workers.

# measure with the model and batch size of digits
blsgd calibrate -c digits
# measure two cores
blsgd calibrate -c digits --workers "1x cpu:0; 1x cpu:1"

plan (experiments): predict how long each algorithm takes, without training

Predict steps, waiting and epoch time of each algorithm from the measured or
given speeds of the workers. Trains nothing.

# measure the workers and predict all algorithms
blsgd plan -c digits
# predict them for devices that this machine does not have
blsgd plan --num-samples 50000 --workers "cuda seconds-per-step=0.01; cpu seconds-per-step=0.1"

compare (experiments): train with several algorithms or settings; write a table

Train with several algorithms, or several values of a setting, each with
several seeds. Write one table and one picture. Runs that are finished are not
repeated.

# compare two algorithms, three seeds each
blsgd compare -c digits --algorithms recommended,sync-sgd --budget 5epochs
# compare three learning rates
blsgd compare -c digits --vary learning-rate=0.02,0.05,0.1 --seeds 0,1

reproduce (experiments): repeat a table of the Biased Local SGD paper

Repeat a table or a figure of the paper on this machine, and show the measured
numbers next to the printed ones. The default is a trial on digits.

# try the table out on handwritten digits
blsgd reproduce bias-2c8g
# run one cell with the paper's data and a small model
blsgd reproduce bias-1c1g --scale quick --only cifar10,32-1

supernode (supernode): connect the devices of this machine to a Flower SuperLink

Start a Flower SuperNode for the devices of this machine, and connect it to a
SuperLink. Run this on every machine. Arguments after -- are for flower-
supernode.

# connect all devices, in a network that you trust
blsgd supernode --superlink 192.168.1.5:8100 --insecure
# connect one GPU, with TLS
blsgd supernode --superlink host:8100 --root-certificates ca.crt --workers "1x cuda:0"

completion (completion): print a script for the tab key in bash or zsh

Print a script for bash or zsh. With it, the tab key completes commands,
options, files, the names of configs (after -c) and of settings (after -s).

# for new terminals with bash-completion
blsgd completion bash >> ~/.bash_completion
# for new terminals with zsh
blsgd completion zsh > "${fpath[1]}/_blsgd"
"""
"""Each command with its module and its line in the list, its description and its examples.

Lines of a description have at most 79 characters. An example is below a comment.
"""


class Command(NamedTuple):
    """A command, whose module has ``_add_<command>`` for its arguments, and ``_<command>``.

    `epilog` has the examples as the last part of the help; each can be copied as it is.
    """

    module: str
    brief: str
    text: str
    epilog: str


def _commands() -> dict[str, Command]:
    found = {}
    parts = iter(_TEXTS.rstrip().split("\n\n"))
    for head, text, examples in zip(parts, parts, parts, strict=True):
        match = re.fullmatch(r"(\w+) \((\w+)\): (.*)", head)
        assert match is not None
        epilog = "examples:\n" + indent(examples, "  ")
        found[match[1]] = Command(match[2], match[3], text, epilog)
    return found


COMMANDS = _commands()


def overview() -> str:
    """Return the help of ``blsgd``; it fits a terminal of 80 columns and 24 lines."""
    lines = [
        "usage: blsgd COMMAND [OPTIONS]",
        "Train a model on unequal devices. Each takes as many steps as its speed allows.",
        "",
    ]
    for title, group in GROUPS.items():
        if title:
            lines.append(f"{title}:")
            lines += [f"  {name:<10} {COMMANDS[name].brief}" for name in group]
    lines += [
        "",
        "blsgd COMMAND --help shows its options, with examples. blsgd --version shows",
        "versions and devices. blsgd completion --help explains how to use the tab key.",
    ]
    return "\n".join(lines) + "\n"
