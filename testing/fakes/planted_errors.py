"""Plants an error at an `await`, `async for` or `async with` of a module, whose functions are compiled again."""

import ast
import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import asynccontextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest


class PlantedError(RuntimeError):
    """An error that nobody foresaw."""


class Planter:
    """Raises the error at one place, a number of times. A place is `module.function: expression`."""

    def __init__(self) -> None:
        self.arm("")

    def arm(self, place: str, *, times: int = 0, error: Exception | None = None) -> None:
        """Choose the place, and forget what happened."""
        self.place, self.remaining, self.error = place, times, error or PlantedError(place)
        self.executed: set[str] = set()
        self.raised_at: list[float] = []

    def plant(self, module: ModuleType, patch: pytest.MonkeyPatch) -> None:
        """Let the functions of a module pass through this planter."""
        tree = ast.fix_missing_locations(_Instrumenter(module).visit(ast.parse(inspect.getsource(module))))
        patch.setattr(module, "_planter", self, raising=False)
        codes = dict(_iterate_codes(compile(tree, str(module.__file__), "exec")))
        for function in _iterate_functions(module, module.__name__):
            patch.setattr(function, "__code__", codes[function.__qualname__])

    def pass_through(self, place: str) -> None:
        """Record that a place is executed, and raise the error that is planted there."""
        self.executed.add(place)
        if place == self.place and self.remaining:
            self.remaining -= 1
            self.raised_at.append(asyncio.get_running_loop().time())
            raise self.error

    async def wait(self, place: str, awaitable: Awaitable[Any]) -> Any:
        """Await, or raise instead."""
        try:
            self.pass_through(place)
        except type(self.error):
            for coroutine in _list_coroutines(awaitable):
                coroutine.close()
            raise
        return await awaitable

    async def iterate(self, place: str, items: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yield the items, or raise before the first one."""
        self.pass_through(place)
        async for item in items:
            yield item

    @asynccontextmanager
    async def enter(self, place: str) -> AsyncIterator[None]:
        """Raise when the context is entered."""
        self.pass_through(place)
        yield


def list_places(module: ModuleType) -> list[str]:
    """Return the places of a module in the order of its text."""
    instrumenter = _Instrumenter(module)
    instrumenter.visit(ast.parse(inspect.getsource(module)))
    return instrumenter.places


class _Instrumenter(ast.NodeTransformer):
    def __init__(self, module: ModuleType) -> None:
        self._path = [module.__name__.rpartition(".")[2]]
        self.places: list[str] = []

    def visit(self, node: Any) -> Any:
        is_scope = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        self._path += [node.name] if is_scope else []
        if isinstance(node, ast.Await):
            node.value = self._call("wait", "await", node.value)
        elif isinstance(node, ast.AsyncFor):
            node.iter = self._call("iterate", "async for in", node.iter)
        elif isinstance(node, ast.AsyncWith):
            call = self._call("enter", "async with", node.items[0].context_expr)
            node.items.insert(0, ast.withitem(ast.Call(call.func, call.args[:1], [])))
        self.generic_visit(node)
        del self._path[len(self._path) - is_scope :]
        return node

    def _call(self, method: str, keyword: str, value: ast.expr) -> ast.Call:
        place = f"{'.'.join(self._path)}: {keyword} {ast.unparse(value)}"
        place += f" ({self.places.count(place) + 1})" if place in self.places else ""
        self.places.append(place)
        return ast.Call(
            ast.Attribute(ast.Name("_planter", ast.Load()), method, ast.Load()), [ast.Constant(place), value], []
        )


def _list_coroutines(awaitable: Awaitable[Any]) -> list[Coroutine[Any, Any, Any]]:
    """Return the coroutine that is not awaited, and those among its arguments."""
    if not inspect.iscoroutine(awaitable):
        return []
    return [awaitable, *filter(inspect.iscoroutine, inspect.getcoroutinelocals(awaitable).values())]


def _iterate_codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _iterate_codes(constant)


def _iterate_functions(owner: Any, module: str) -> Iterator[FunctionType]:
    """Yield the asynchronous functions and methods that a module defines, below their decorators."""
    for value in [each for each in vars(owner).values() if getattr(each, "__module__", "") == module]:
        function = inspect.unwrap(value) if inspect.isfunction(value) else value
        if inspect.isclass(value):
            yield from _iterate_functions(value, module)
        elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            yield function
