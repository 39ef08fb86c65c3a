from __future__ import annotations

import socket

import pytest

from cluster import cli, console
from cluster.client import Client
from cluster.commands import ask, flags, local
from cluster.local_cluster import check_security
from cluster.member_state import MemberReport, Phase
from cluster.supervisor import ClusterView
from kvferry.config import ClusterConfig, settings
from kvferry.membership import Membership
from kvferry.rpc.v1 import inference_pb2 as inference


def parse(*arguments):
    return cli.build_parser().parse_args(list(arguments))


def test_every_setting_is_a_flag_of_serve():
    for name, _ in settings():
        arguments = vars(parse("serve", f"--{name}", "7"))
        assert arguments[f"setting:{name}"] == "7", name


def test_the_help_says_what_each_setting_means_may_be_and_is(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Sequences tracked at once, handoffs included. [64]" in words
    assert "One of lru, lfu, fifo, filo, mru, priority, slru [lru]" in words


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "kvferry.yaml"
    file.write_text("cache: {page_size: 4, rows: 8}\n")
    arguments = parse("serve", "--config", str(file), "--cache.page_size", "64")
    config = flags.config_of(arguments)
    assert (config.cache.page_size, config.cache.rows) == (64, 8)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate"], "prompt"),
        (["generate", "hello", "--temperature", "warm"], "--temperature"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_why(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--cache.page_sise", "4"], "did you mean --cache.page_size?"),
        (["serve", "--nonsense"], "unknown argument --nonsense"),
        (["generate", "hello", "--max-token", "4"], "did you mean --max-tokens?"),
        (["simulate", "--kv-token", "4"], "did you mean --kv-tokens?"),
        (["simulate", "--cache.page_sise", "4"], "did you mean --cache.page_size?"),
        (["generate", "hello", "--cache-sal", "x"], "did you mean --cache-salt?"),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_nearest_known_one(arguments, expected, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--cache.page_size", "none"], "cache.page_size"),
        (["serve", "--workers.decode.count", "0"], "workers.decode.count"),
        (["serve", "--model.dtype", "int3"], "must be one of"),
        (["serve", "--config", "/nowhere/kvferry.yaml"], "cannot read"),
        (["generate", "hello", "--seed", "-1"], "sampling"),
        (["serve", "--router.security.tls_key", "k.pem"], "router.security.tls_key: needs"),
        (["serve", "--router.security.api_keys", "/nowhere/k"], "router.security.api_keys: cannot"),
        (["status", "--tls-ca", "/nowhere/ca.pem"], "tls-ca: cannot read /nowhere/ca.pem"),
        (["status", "--tls-certificate", "c.pem"], "tls-key: goes with tls-certificate"),
        (["status", "--tls-certificate", "c", "--tls-key", "k"], "tls-certificate: needs tls-ca"),
        (["demo", "--router.security.api_keys", "/nowhere/k"], "router.security: must be empty"),
        (["generate", ""], "prompt: must not be empty"),
        (["generate", "hello", "--sharing", "all"], "must be one of shared, recomputed, private"),
        (["generate", "hello", "--priority", str(2**31)], "priority"),
        (["generate", "hello", "--n", str(2**31)], "n: "),
    ],
)
def test_a_wrong_setting_ends_with_2_and_one_line(arguments, expected, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvferry: ")
    assert expected in error
    assert len(error.splitlines()) == 1


def test_no_cluster_ends_with_1_and_says_where_it_was_looked_for(capsys):
    assert cli.main(["status", "--address", "127.0.0.1:1"]) == 1
    assert "no kvferry cluster answers at 127.0.0.1:1" in capsys.readouterr().err


def test_the_key_of_client_commands_is_no_setting(monkeypatch):
    monkeypatch.setenv("KVFERRY_API_KEY", "the-key")
    assert flags.config_of(parse("serve")) == ClusterConfig()
    with flags.client_of(parse("status")) as client:
        assert client._metadata == (("authorization", "Bearer the-key"),)


def test_processes_elsewhere_get_the_names_of_files_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("blue: 0123456789abcdef\n")
    config = flags.config_of(parse("serve", "--router.security.api_keys", "keys"))
    assert check_security(config).router.security.api_keys == str(tmp_path / "keys")


def test_only_sampling_that_is_given_is_sent_but_for_a_greedy_default():
    given = ask._sampling_of(parse("generate", "hello", "--top-k", "5", "--stop", "a"))
    assert given == inference.SamplingParams(temperature=0.0, top_k=5, stop=["a"])
    warm = ask._sampling_of(parse("generate", "hello", "--temperature", "0.5"))
    assert warm == inference.SamplingParams(temperature=0.5)


def test_wishes_about_the_cache_are_sent():
    plain = ask._request_of(parse("generate", "hello"))
    assert plain == inference.GenerateRequest(sampling={"temperature": 0.0})
    wishes = ("--cache-salt", "tenant", "--sharing", "private", "--priority", "-7")
    assert ask._request_of(parse("generate", "hello", *wishes)) == inference.GenerateRequest(
        sampling={"temperature": 0.0},
        cache_salt="tenant",
        sharing=inference.SHARING_PRIVATE,
        priority=-7,
    )


@pytest.mark.parametrize(
    ("failure", "code"), [(None, 0), (console.AuditFailed("violations in: decode-0"), 1)]
)
def test_the_exit_code_of_an_audit_says_what_it_found(failure, code, monkeypatch, capsys):
    def audit(_client, worker_id):
        assert worker_id == "decode-0"
        if failure is not None:
            raise failure

    monkeypatch.setattr(console, "audit", audit)
    assert cli.main(["audit", "decode-0"]) == code
    expected = "" if failure is None else "kvferry: violations in: decode-0\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("name", ["router.port", "router.http.port", "router.smg.port"])
def test_port_in_use_is_told_before_anything_is_started(name, monkeypatch, capsys):
    monkeypatch.setattr(local, "resolved", lambda config: config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = [] if name == "router.port" else ["--router.port", "0"]
        assert cli.main(["serve", f"--{name}", str(port), *other]) == 2
    assert f"{name}: 127.0.0.1:{port} is in use" in capsys.readouterr().err


def test_the_number_of_answers_is_sent(monkeypatch):
    sent = []
    monkeypatch.setattr(console, "generate", lambda _c, _p, request, **_: sent.append(request))
    assert cli.main(["generate", "hello", "--n", "3", "--temperature", "1"]) == 0
    assert sent == [inference.GenerateRequest(sampling={"temperature": 1.0, "n": 3})]


@pytest.mark.parametrize(
    ("arguments", "call", "said"),
    [
        (["add-worker", "decode"], ("add_worker", "decode"), "decode-1 is being started"),
        (["set-role", "w", "both"], ("set_role", "w", "both"), "w is used for both from now on"),
        (["remove-worker", "w"], ("remove_worker", "w", 600.0), "it had nothing left to do"),
        (
            ["remove-worker", "w", "--drain-s", "0"],
            ("remove_worker", "w", 0.0),
            "what it had goes on at other workers",
        ),
    ],
)
def test_orders_are_given_and_what_came_of_them_is_told(arguments, call, said, monkeypatch, capsys):
    calls = []

    def note(name, answer):
        return lambda _client, *given: calls.append((name, *given)) or answer(*given)

    monkeypatch.setattr(Client, "add_worker", note("add_worker", lambda _role: "decode-1"))
    monkeypatch.setattr(Client, "set_role", note("set_role", lambda _worker, _role: None))
    monkeypatch.setattr(Client, "remove_worker", note("remove_worker", lambda _w, s: s > 0))
    assert cli.main(arguments) == 0
    assert calls == [call]
    assert said in capsys.readouterr().out


def test_who_comes_and_goes_is_told(capsys):
    def report(name, phase):
        return MemberReport(name, phase, 1, None, "", failed_for_good=False)

    def view(*reports):
        return ClusterView(Membership(1, ()), (), reports, 1, is_complete=True)

    running, starting = Phase.RUNNING, Phase.STARTING

    views = [
        view(report("a", running), report("b", starting)),
        view(report("b", running)),
    ]

    class Cluster:
        def wait_for_change(self, _seen, _timeout_s):
            if not views:
                raise KeyboardInterrupt
            return views.pop(0)

    local._watch(Cluster(), view(report("a", running)))
    assert capsys.readouterr().out.splitlines() == ["b: starting", "b: running", "a: removed"]
