"""Policies: jmp's grammar and meaning, exact errors, and text that is read back."""

import copy
import dataclasses
import pickle
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_amp as amp

FLOATS = [
    *(jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64),
    *(jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e3m4, jnp.float8_e4m3),
    *(jnp.float8_e4m3b11fnuz, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz),
    *(jnp.float8_e8m0fnu, jnp.float4_e2m1fn),
]


def dtype_names(policy):
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    return tuple(dtype.name for dtype in dtypes)


# What jmp 0.0.4 from PyPI answers, executed.
JMP = [
    ("c=f16", "float32", "float16", "float16"),
    ("p=f16,c=f16", "float16", "float16", "float16"),
    ("p=f16,c=bf16", "float16", "bfloat16", "bfloat16"),
    ("p=bf16", "bfloat16", "bfloat16", "bfloat16"),
    ("o=f16", "float32", "float32", "float16"),
    ("c=bf16,o=full", "float32", "bfloat16", "float32"),
    ("params=f16,compute=bf16,output=f32", "float16", "bfloat16", "float32"),
    ("output=f16,params=bf16", "bfloat16", "bfloat16", "float16"),
    ("p=full,c=f16,o=float32", "float32", "float16", "float32"),
    ("f16", "float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ("full", "float32", "float32", "float32"),
    ("float64", "float64", "float64", "float64"),
    ("p=f64,o=f32", "float64", "float64", "float32"),
    ("p=float16", "float16", "float16", "float16"),
    ("compute=float16", "float32", "float16", "float16"),
]


@pytest.mark.parametrize(("text", *"pco"), JMP)
def test_text_means_what_it_means_to_jmp(text, p, c, o):
    assert dtype_names(amp.get_policy(text)) == (p, c, o)


@pytest.mark.parametrize(
    ("text", *"pco"),
    [
        ("mixed_bfloat16", "float32", "bfloat16", "float32"),
        ("mixed_float16", "float32", "float16", "float32"),
        ("Mixed-Float16", "float32", "float16", "float32"),
        ("float32", "float32", "float32", "float32"),
        ("half", "bfloat16", "bfloat16", "bfloat16"),
        # jmp: unknown key ' c'.
        ("p=f32, c=f16", "float32", "float16", "float16"),
        (" P = F32 , Compute = BF16 ", "float32", "bfloat16", "bfloat16"),
        ("c=f8_e4m3,o=bf16", "float32", "float8_e4m3fn", "bfloat16"),
        ("p=bf16,c=float8_e5m2", "bfloat16", "float8_e5m2", "float8_e5m2"),
        ("param_dtype=bf16,output_dtype=f32", "bfloat16", "bfloat16", "float32"),
    ],
)
def test_text_is_read_forgivingly(text, p, c, o):
    assert dtype_names(amp.get_policy(text)) == (p, c, o)


def test_default_policy_is_mixed_bfloat16():
    assert dtype_names(amp.Policy()) == ("float32", "bfloat16", "float32")
    assert amp.Policy() == amp.get_policy("mixed_bfloat16")


@pytest.mark.parametrize("given", ["f16", "float16", jnp.float16, np.dtype("float16")])
def test_dtypes_given_in_any_form_make_equal_policies(given):
    policy = amp.Policy(given, given, given)
    assert policy == amp.get_policy("f16")
    assert hash(policy) == hash(amp.get_policy("f16"))
    assert isinstance(policy.param_dtype, np.dtype)
    assert policy.param_dtype == jnp.float16


names = st.sets(
    st.from_regex(re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII), fullmatch=True)
    | st.text(min_size=1, max_size=5).filter(str.isidentifier),
    max_size=6,
)


@st.composite
def policies(draw):
    members = sorted(draw(names))
    classes = [draw(st.sampled_from(["low", "full", "follow"])) for _ in members]
    pairs = list(zip(members, classes, strict=True))
    param, compute, output = (draw(st.sampled_from(FLOATS)) for _ in range(3))
    return amp.Policy(
        *(param, compute, output),
        saved=draw(st.sampled_from([None, "all", "auto", "least"])),
        reduce_dtype=draw(st.sampled_from([None, "float32"])),
        low={name for name, its_class in pairs if its_class == "low"},
        full={name for name, its_class in pairs if its_class == "full"},
        follow={name for name, its_class in pairs if its_class == "follow"},
    )


@hypothesis.given(policies())
@hypothesis.settings(deadline=None, max_examples=200)
def test_every_policy_is_read_back_from_its_text(policy):
    text = str(policy)
    assert amp.get_policy(text) == policy
    # The text stands in a name scope, `amp[...]`, between slashes.
    assert not re.search(r"[\[\]()/\s]", text)
    assert eval(repr(policy), {"Policy": amp.Policy}) == policy


def test_text_of_a_policy_does_not_depend_on_the_order_of_names():
    names = ["tan", "sin", "erf", "dot", "cos", "abs", "log", "exp"]
    first = amp.Policy().with_low(*names).with_full("softmax")
    second = amp.Policy().with_full("softmax").with_low("abs").with_low(*names[::-1])
    assert first == second
    low = "abs+cos+dot+erf+exp+log+sin+tan"
    assert str(first) == str(second) == f"p=f32,c=bf16,o=f32,low={low},full=softmax"


def test_text_of_a_policy_made_from_numpy_dtypes_exists():
    # jmp: KeyError.
    half = jnp.dtype(jnp.bfloat16)
    assert str(amp.Policy(half, half, half)) == "p=bf16,c=bf16,o=bf16"


def test_names_of_operations_keep_their_case():
    policy = amp.get_policy("C=BF16,LOW=MyAttention + tanh")
    assert policy.low == {"MyAttention", "tanh"}


def test_a_primitive_named_with_a_dash_is_read_as_an_identifier():
    # lax.scatter_add_p.name is "scatter-add".
    assert amp.Policy().with_full("scatter-add").full == {"scatter_add"}


def test_names_are_added_to_a_class_and_the_rest_of_the_policy_stays():
    start = amp.Policy("bf16", "f16", "f64", full={"exp"})
    policy = start.with_low("tanh").with_full("log").with_follow("sin", "cos")
    assert dtype_names(policy) == ("bfloat16", "float16", "float64")
    assert policy.low == {"tanh"}
    assert policy.full == {"exp", "log"}
    assert policy.follow == {"sin", "cos"}
    assert start == amp.Policy("bf16", "f16", "f64", full={"exp"})


def test_naming_an_operation_again_or_none_changes_nothing():
    policy = amp.Policy().with_low("tanh")
    assert policy.with_low("tanh") == policy
    assert policy.with_full() == policy


def test_with_output_dtype_changes_only_the_output_dtype():
    policy = amp.Policy("bf16", "f16", "f32", low={"tanh"}).with_output_dtype("f64")
    assert policy == amp.Policy("bf16", "f16", "f64", low={"tanh"})


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.loads])
def test_a_copied_or_pickled_policy_is_equal(clone):
    policy = amp.Policy(compute_dtype="f8_e4m3").with_low("tanh")
    given = pickle.dumps(policy) if clone is pickle.loads else policy
    assert clone(given) == policy
    assert hash(clone(given)) == hash(policy)


def test_a_policy_cannot_be_changed():
    with pytest.raises(AttributeError):
        amp.Policy().compute_dtype = jnp.float16  # pyright: ignore


def test_a_policy_is_a_leaf_and_a_static_argument_that_compiles_once():
    assert jax.tree.leaves(amp.Policy()) == [amp.Policy()]
    traces = []

    def cast(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    jitted = jax.jit(cast, static_argnums=0)
    for text in ("c=bf16,o=f32", "mixed_bfloat16", "p=f32,c=bf16,o=f32"):
        assert jitted(amp.get_policy(text), jnp.ones(3)).dtype == jnp.bfloat16
    assert len(traces) == 1
    assert jitted(amp.get_policy("mixed_float16"), jnp.ones(3)).dtype == jnp.float16


def test_a_policy_passes_through_get_policy():
    policy = amp.Policy().with_low("tanh")
    assert amp.get_policy(policy) is policy


@pytest.mark.breadth(2)
@pytest.mark.parametrize("method", ["param", "compute", "output"])
@pytest.mark.parametrize("jitted", [False, True])
def test_cast_to_casts_floating_arrays_to_the_dtype_of_its_name(method, jitted):
    policy = amp.Policy("f16", "bf16", "f32")
    tree = {
        "half": jnp.ones(2, jnp.float16),
        "brain": jnp.ones(2, jnp.bfloat16),
        "full": jnp.ones(2, jnp.float32),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "int": jnp.arange(2),
        "bool": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "none": None,
    }
    cast = getattr(policy, f"cast_to_{method}")
    result = (jax.jit(cast) if jitted else cast)(tree)
    wanted = {"param": jnp.float16, "compute": jnp.bfloat16, "output": jnp.float32}
    for name in ("half", "brain", "full"):
        assert result[name].dtype == wanted[method], name
    for name in ("fp8", "int", "bool", "complex", "key"):
        assert result[name].dtype == tree[name].dtype, name
    assert result["none"] is None


def raises(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}")


DTYPES = "Use one of f16, bf16, f32, f64, f8_e4m3, f8_e5m2, or half (here bfloat16)."
FORMS = (
    'Write "p=f32,c=bf16,o=f32", a dtype alone such as "bf16" or "float32" for all '
    'three, "mixed_bfloat16" or "mixed_float16".'
)


REDUCES = (
    "Gradients are made and summed in float32, or in the dtype of the operation that "
    'makes them. Use "float32", or None for the latter.'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c=fp17", f"unknown dtype 'fp17' at \"c=\". {DTYPES}"),
        ("p=f32,Compute=int32", f"unknown dtype 'int32' at \"Compute=\". {DTYPES}"),
        ("c=", f"unknown dtype '' at \"c=\". {DTYPES}"),
        ("c=f16=f32", f"unknown dtype 'f16=f32' at \"c=\". {DTYPES}"),
        (
            "x=f16",
            "unknown key 'x'. Use p (params), c (compute), o (output), low, full or "
            "follow. Products in fp8 are m (matmul), what the backward pass keeps is s "
            "(saved), what gradients are summed in over devices is r (reduce_dtype).",
        ),
        ("c=f16,r=bf16", f"Policy(reduce_dtype='bf16'): {REDUCES}"),
        ("c=f16,reduce=f64", f"Policy(reduce_dtype='f64'): {REDUCES}"),
        (
            "c=f16,r=fp17",
            f"Policy(reduce_dtype='fp17'): unknown dtype 'fp17'. {REDUCES}",
        ),
        ("c=f16,r=f32,reduce_dtype=f32", '"reduce_dtype=" sets reduce_dtype a second'),
        ("r=f32", "reduce_dtype but no dtypes. Say which, for example"),
        ("c=f16,c=f32", '"c=" sets compute_dtype a second time. Set it once.'),
        ("c=f16,compute=f16", '"compute=" sets compute_dtype a second time.'),
        ("c=f16,low=a,low=b", '"low=" sets low a second time. Set it once.'),
        ("c=bf16,f32", f"'f32' is not of the form key=value. {FORMS}"),
        ("c=bf16,", f"'' is not of the form key=value. {FORMS}"),
        (
            "bfloat17",
            f"unknown policy 'bfloat17'. Did you mean \"bfloat16\"? {FORMS}",
        ),
        (
            "mixed_bf16",
            f"unknown policy 'mixed_bf16'. Did you mean \"mixed_bfloat16\"? {FORMS}",
        ),
        ("zebra", f"unknown policy 'zebra'. {FORMS}"),
        ("", f"unknown policy ''. {FORMS}"),
        (
            "c=f16,low=a+b,follow=b",
            "Policy: 'b' is both in low and in follow. An operation has one class: "
            "name it in one of them only.",
        ),
        ("c=f16,low=", "Policy(low=...): '' is not the name of an operation."),
        ("c=f16,low=a b", "Policy(low=...): 'a b' is not the name of an operation."),
        ("c=f16,low=a/b", "Policy(low=...): 'a/b' is not the name of an operation."),
        (
            "low=tanh",
            'low but no dtypes. Say which, for example "p=f32,c=bf16,o=f32,low=tanh".',
        ),
    ],
)
def test_bad_text_is_an_error_that_names_the_word_and_the_remedy(text, message):
    with raises(ValueError, f'get_policy("{text}"): {message}'):
        amp.get_policy(text)


@pytest.mark.parametrize("given", [3, None, jnp.bfloat16, {"c": "bf16"}])
def test_what_is_neither_text_nor_policy_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"wanted a Policy or its text, got .* Write"):
        amp.get_policy(given)


# Keras: DTypePolicy("int32") is accepted.
@pytest.mark.parametrize("given", ["int32", jnp.int32, bool, jnp.complex64, None])
@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
def test_a_policy_of_another_dtype_than_a_float_is_refused(field, given):
    with pytest.raises(TypeError, match=rf"^Policy\({field}=.*\): .* Use one of f16"):
        amp.Policy(**{field: given})


def test_an_unknown_dtype_names_the_argument_that_has_it():
    with raises(
        ValueError, f"Policy(compute_dtype='fp17'): unknown dtype 'fp17'. {DTYPES}"
    ):
        amp.Policy(compute_dtype="fp17")
    with raises(ValueError, "Policy.with_output_dtype('fp17'): unknown dtype 'fp17'."):
        amp.Policy().with_output_dtype("fp17")


@pytest.mark.parametrize("first", ["low", "full", "follow"])
@pytest.mark.parametrize("second", ["low", "full", "follow"])
def test_a_name_in_two_classes_is_an_error_that_names_both(first, second):
    if first == second:
        return
    policy = amp.Policy(**{first: {"tanh"}})
    both = sorted((first, second), key=["low", "full", "follow"].index)
    message = (
        f"'tanh' is both in {both[0]} and in {both[1]}. An operation has one class: "
        "name it in one of them only."
    )
    with raises(ValueError, f"Policy.with_{second}('sin', 'tanh'): Policy: {message}"):
        getattr(policy, f"with_{second}")("sin", "tanh")
    with raises(ValueError, f"Policy: {message}"):
        amp.Policy(**{first: {"tanh"}, second: {"tanh"}})


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "amp[x]", "a+b", "a,b", "a=b", "1a"]
)
def test_a_name_that_is_no_identifier_is_refused(name):
    fact = f"Policy(low=...): {name!r} is not the name of"
    with raises(ValueError, f"Policy.with_low({name!r}): {fact}"):
        amp.Policy().with_low(name)


@pytest.mark.parametrize("given", [jnp.tanh, ["tanh"], 3, None])
def test_a_name_that_is_no_string_is_refused(given):
    with pytest.raises(TypeError, match=r"is no collection of names. Use a set of str"):
        amp.Policy().with_full(given)


@pytest.mark.parametrize("given", ["tanh", None, 3])
def test_names_that_are_no_collection_are_refused(given):
    # A bare string would silently be the set of its letters.
    with pytest.raises(TypeError, match=r"^Policy\(low=\.\.\.\): .* Use a set"):
        amp.Policy(low=given)


# The dtype in which gradients are reduced


@pytest.mark.parametrize("given", ["float32", "F32", jnp.float32, np.dtype("f4")])
def test_gradients_are_reduced_in_f32_or_as_they_are_made(given):
    policy = amp.Policy(reduce_dtype=given)
    assert policy.reduce_dtype == np.float32
    assert str(policy) == "p=f32,c=bf16,o=f32,r=f32"
    assert policy != amp.Policy() and amp.Policy().reduce_dtype is None
    assert dataclasses.replace(policy, compute_dtype="f16").reduce_dtype == np.float32
    assert policy.with_full("tanh").reduce_dtype == np.float32
    for text in ("p=f32,c=bf16,o=f32,reduce=float32", "p=f32,c=bf16,o=f32,R=F32"):
        assert amp.get_policy(text) == policy
    assert amp.get_policy("p=f32,c=bf16,o=f32,r=none") == amp.Policy()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("bfloat16", ValueError, f"Policy(reduce_dtype='bfloat16'): {REDUCES}"),
        (jnp.float16, ValueError, f"Policy(reduce_dtype={jnp.float16!r}): {REDUCES}"),
        ("int32", TypeError, "Policy(reduce_dtype='int32'): int32 is not a floating"),
        (7, TypeError, "Policy(reduce_dtype=7): that is not a dtype."),
        ("fast", ValueError, "Policy(reduce_dtype='fast'): unknown dtype 'fast'."),
        ([], TypeError, "Policy(reduce_dtype=[]): "),
    ],
)
def test_other_dtypes_to_reduce_in_are_refused(given, kind, message):
    with raises(kind, message) as raised:
        amp.Policy(reduce_dtype=given)
    assert str(raised.value).endswith('Use "float32", or None for the latter.')


def test_a_recipe_names_itself_in_the_error():
    with raises(ValueError, f"recipe('bf16'): Policy(reduce_dtype='bf16'): {REDUCES}"):
        amp.recipe("bf16", reduce_dtype="bf16")
