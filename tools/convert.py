"""Turns an HF folder into a Megatron torch_dist checkpoint, and back.

    python tools/convert.py configs/tiny_moe /tmp/tiny_megatron --to torch_dist
    python launch/afd_decode.py --config configs/tiny_moe_2a2f_gloo.yaml \\
        --set model.path=/tmp/tiny_megatron --set model.load=torch_dist --overwrite
    python tools/convert.py /tmp/tiny_megatron /tmp/tiny_hf --to hf

The first output has its checkpoint in release/, as Megatron's own converters do; Megatron's dist_checkpointing loads it
into a model with the keys of TransformerEngine. Config and tokenizer are copied, so that each folder serves as
`model.path`. Values keep their dtype, but weights in fp8 blocks or mxfp4 become bfloat16, and the
config loses its quantization_config. Towards torch_dist memory holds one expert or one other tensor at a time, towards
HF one file of 5 GB. OUTPUT appears when it is complete.
"""

import argparse
import sys
import warnings
from pathlib import Path

from tqdm import tqdm

from afd_megatron.errors import AfdError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model: config.json, weights, tokenizer")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--to", choices=["torch_dist", "hf"], required=True, help="format of OUTPUT")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of optional packages that a conversion does not use
    from afd_megatron.models.convert import convert

    with tqdm(unit="B", unit_scale=True, desc=str(args.output)) as bar:

        def show(num_done: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_done - bar.n)

        try:
            convert(args.folder, args.output, args.to, show)
        except AfdError as error:
            bar.close()
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
