"""FFTUNE_BATCH_INVARIANT: a row has the same bits in every batch, for the ops that have the option."""
import pytest

PROGRAM = """
    import json
    import torch
    from fftune import ops, _run

    torch.manual_seed(0)
    def numbers(*shape):
        return (torch.randn(*shape) / 4).bfloat16()
    d, h = 64, 96
    x, w, up, down = numbers(40, d), numbers(5 * 16, d), numbers(2 * h, d), numbers(d, h)
    experts = numbers(4, 2 * h, d), numbers(4, d, h)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(40)]).int()
    norm = torch.ones(d).bfloat16()
    calls = {
        "linear": lambda x, ids: ops.linear(x, w),
        "qkv": lambda x, ids: torch.cat([t.flatten(1) for t in ops.qkv(x, w, 3, 1)], 1),
        "ffn": lambda x, ids: ops.ffn_block(x, None, norm, up[:h], up[h:], down),
        "moe-ffn": lambda x, ids: ops.moe_ffn(x, ids, torch.ones(ids.shape) / 2, experts[0], None,
                                              experts[1]),
        "rmsnorm": lambda x, ids: ops.rmsnorm(x, norm),
    }
    found = []
    _run._listeners.append(lambda device, problem: found.append(problem))
    same = {}
    for name, call in calls.items():
        all_rows = call(x, ids)
        same[name] = all(torch.equal(call(x[first:first + count], ids[first:first + count]),
                                     all_rows[first:first + count])
                         for first, count in ((0, 1), (3, 2), (8, 7), (5, 33)))
    # Tokens of a prompt, one or all of them new.
    q, kv = x.view(1, 40, 4, 16), numbers(1, 40, 2, 16)
    all_rows = ops.attention(q, kv, kv, causal=True)
    same["attention"] = all(torch.equal(ops.attention(q[:, -count:], kv, kv, causal=True),
                                        all_rows[:, -count:]) for count in (1, 3, 17, 39))
    print(json.dumps([same, sorted({p["op"] for p in found if "batch-invariant" in p})]))
"""


@pytest.mark.parametrize("name", ["FFTUNE_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"])
def test_rows_have_the_same_bits(run_python, name):
    import json

    same, ops = json.loads(run_python(PROGRAM, **{name: "1"}))
    assert all(same.values()), same
    assert ops == sorted(same)


PAGED = """
    import torch
    from fftune import ops

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [1300, 513, 512, 7, 0] * 32  # on a GPU many sequences do not divide their keys
    k, v = (torch.randn(100, 16, 2, 64).bfloat16().to(device) for _ in range(2))
    pages = torch.stack([torch.randperm(100)[:82] for _ in lengths]).int().to(device)
    q = torch.randn(len(lengths), 8, 64).bfloat16().to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    many = ops.attention(q[:, None], k, v, pages=pages, lengths=counts)[:, 0]
    few = torch.cat([ops.attention(q[i:i + n, None], k, v, pages=pages[i:i + n], lengths=counts[i:i + n])[:, 0]
                     for i, n in ((0, 1), (1, 2), (3, 2))])
    # 200, 1, 512, 3 and 0 new tokens of the first sequences; the last of each is the one above.
    offsets = torch.tensor([0, 200, 201, 713, 716, 716], dtype=torch.int32, device=device)
    packed = torch.randn(716, 8, 64).bfloat16().to(device)
    packed[offsets[1:5].long() - 1] = q[:4]
    prompts = ops.attention(packed, k, v, offsets=offsets, causal=True, pages=pages[:5].contiguous(), lengths=counts[:5])
    print(torch.equal(few, many[:5]), torch.equal(prompts[offsets[1:5].long() - 1], many[:4]), bool(many[4].any()))
"""


def test_keys_of_pages_in_decoding_and_prompts(run_python):
    assert run_python(PAGED, FFTUNE_BATCH_INVARIANT="1") == "True True False"


def test_it_is_off_by_default(run_python):
    assert run_python(PROGRAM, FFTUNE_BATCH_INVARIANT="0").endswith("[]]")
