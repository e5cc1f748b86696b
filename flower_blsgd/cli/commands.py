"""The commands of ``blsgd``: where each one is, and its texts in the help."""

from dataclasses import dataclass
from textwrap import indent


@dataclass(frozen=True)
class Command:
    """A command, whose module has functions ``add_<command>`` for its arguments and ``_<command>``.

    `brief` is its line in the list of commands, and `text` has lines of at most 79 characters. The
    examples are command lines, each with its purpose.
    """

    module: str
    brief: str
    text: str
    examples: tuple[tuple[str, str], ...]

    @property
    def epilog(self) -> str:
        """The examples as the last part of the help; each can be copied as it is."""
        lines = (f"# {purpose}\n{line}" for line, purpose in self.examples)
        return "examples:\n" + indent("\n".join(lines), "  ")


GROUPS = {
    "train": {
        "run": Command(
            "main",
            "train on the devices of this machine",
            "Train a model with one process per device, each pinned to its device. Faster\n"
            "devices take more steps, so that they do not wait. The results are written to\n"
            "runs/<name>-<n>. Also runs any other Flower app.",
            (
                ("blsgd run -c digits -s epochs=5", "train on handwritten digits, on all cores"),
                (
                    'blsgd run -c cifar10-smoke --workers "1x cuda:0 fast; 1x cpu:0-7 slow"',
                    "train on a GPU and on eight CPU cores",
                ),
            ),
        ),
        "launch": Command(
            "launch",
            "train with your own script, which runs on every device",
            "Run a training script on every device of this machine, and average its models.\n"
            "The script calls flower_blsgd.join(model, optimizer), and session.step() after\n"
            "each optimizer.step().",
            (
                (
                    'blsgd launch --workers "1x cuda:0 fast; 1x cuda:1" --samples 500000 train.py',
                    "train on two GPUs, until both together have trained on 500,000 samples",
                ),
                (
                    "blsgd launch --seconds 600 train.py --lr 0.1",
                    "train for ten minutes on all devices; --lr is an option of the script",
                ),
            ),
        ),
        "prepare": Command(
            "main",
            "download and convert data first, so that runs start immediately",
            "Download, check and convert the data of a task, once per machine. A run does\n"
            "this itself if the data are not ready.",
            (
                ("blsgd prepare -c cifar10-1c1g", "prepare CIFAR-10"),
                ("blsgd prepare -s task=images -s data=photos", "prepare your own images"),
            ),
        ),
    },
    "look": {
        "devices": Command(
            "main",
            "list the devices of this machine, and the default workers",
            "List the CPU cores and accelerators that this process may use, and the workers\n"
            'of a specification; those of "auto" without --workers. Trains nothing.',
            (
                ("blsgd devices", "list the devices and the default workers"),
                (
                    'blsgd devices --workers "2x cpu fast; 1x cpu slow"',
                    "check a specification, and see which cores each worker gets",
                ),
            ),
        ),
        "watch": Command(
            "watch",
            "follow a run: curve, speeds, who waits, time left, failures",
            "Show a run while it trains, in this or another terminal: its progress and\n"
            "learning curve, who computes and who waits, and failures. Ends with the run, or\n"
            "at Ctrl-C, which does not stop the run. Without a terminal, shows it once.",
            (
                ("blsgd watch", "follow the newest run"),
                ("blsgd watch runs/digits-3", "follow another one, also after its --resume"),
            ),
        ),
        "evaluate": Command(
            "main",
            "test the model of a run on the whole test set",
            "Load the model of a run, and test it on the whole test set.",
            (
                ("blsgd evaluate runs/latest", "test the model of the newest run"),
                (
                    "blsgd evaluate runs/photos-1 --data /mnt/photos --device cpu",
                    "test it on the CPU, with data that have moved",
                ),
            ),
        ),
        "report": Command(
            "experiments",
            "write an HTML page about a run or a comparison",
            "Write an HTML page with the figures and pictures of a run, of a comparison, or\n"
            "of a reproduction. The page is one file, which needs no network.",
            (
                ("blsgd report runs/latest", "write runs/latest/report.html"),
                (
                    "blsgd report runs/compare-digits --out page.html",
                    "write the page of a comparison to another file",
                ),
            ),
        ),
    },
    "compare": {
        "calibrate": Command(
            "experiments",
            "measure how fast each device trains",
            "Measure the seconds per step of every worker, alone and together with the\n"
            "others, and the time to send and average models. Print a line for workers.",
            (
                ("blsgd calibrate -c digits", "measure with the model and batch size of digits"),
                (
                    'blsgd calibrate -c digits --workers "1x cpu:0; 1x cpu:1"',
                    "measure two cores",
                ),
            ),
        ),
        "plan": Command(
            "experiments",
            "predict how long each algorithm takes, without training",
            "Predict steps, waiting and epoch time of each algorithm from the measured or\n"
            "given speeds of the workers. Trains nothing.",
            (
                ("blsgd plan -c digits", "measure the workers and predict all algorithms"),
                (
                    "blsgd plan --algorithms recommended,sync-sgd --num-samples 50000 "
                    '--workers "1x cuda:0 seconds-per-step=0.01; 1x cpu seconds-per-step=0.1"',
                    "predict two of them for devices that this machine does not have",
                ),
            ),
        ),
        "compare": Command(
            "experiments",
            "train with several algorithms or settings; write a table",
            "Train with several algorithms, or several values of a setting, each with\n"
            "several seeds. Write one table and one picture. Runs that are finished are not\n"
            "repeated.",
            (
                (
                    "blsgd compare -c digits --algorithms recommended,sync-sgd --budget 5epochs",
                    "compare two algorithms, three seeds each",
                ),
                (
                    "blsgd compare -c digits --vary learning-rate=0.02,0.05,0.1 --seeds 0,1",
                    "compare three learning rates",
                ),
            ),
        ),
        "reproduce": Command(
            "experiments",
            "repeat a table of the Biased Local SGD paper",
            "Repeat a table or a figure of the paper on this machine, and show the measured\n"
            "numbers next to the printed ones. The default is a trial on digits.",
            (
                ("blsgd reproduce bias-2c8g", "try the table out on handwritten digits"),
                (
                    "blsgd reproduce bias-1c1g --scale quick --only cifar10,32-1",
                    "run one cell with the paper's data and a small model",
                ),
            ),
        ),
    },
    "several machines": {
        "supernode": Command(
            "supernode",
            "connect the devices of this machine to a Flower SuperLink",
            "Start a Flower SuperNode for the devices of this machine, and connect it to a\n"
            "SuperLink. Run this on every machine. Arguments after -- are for flower-\n"
            "supernode.",
            (
                (
                    "blsgd supernode --superlink 192.168.1.5:9092 --insecure",
                    "connect all devices, in a network that you trust",
                ),
                (
                    "blsgd supernode --superlink host:9092 --root-certificates ca.crt "
                    '--workers "1x cuda:0"',
                    "connect one GPU, with TLS",
                ),
            ),
        ),
    },
    "": {
        "completion": Command(
            "completion",
            "print a script for the tab key in bash or zsh",
            "Print a script for bash or zsh. With it, the tab key completes commands,\n"
            "options, files, the names of configs (after -c) and of settings (after -s).",
            (
                (
                    "blsgd completion bash >> ~/.bash_completion",
                    "for new terminals with bash-completion",
                ),
                (
                    'blsgd completion zsh > "${fpath[1]}/_blsgd"',
                    "for new terminals with zsh",
                ),
            ),
        ),
    },
}
"""The commands by name, grouped by purpose."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


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
            lines += [f"  {name:<10} {command.brief}" for name, command in group.items()]
    lines += [
        "",
        "blsgd COMMAND --help shows its options, with examples. blsgd --version shows",
        "versions and devices. blsgd completion --help explains how to use the tab key.",
    ]
    return "\n".join(lines) + "\n"
