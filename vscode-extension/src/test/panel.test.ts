import assert from "node:assert/strict";
import { test } from "node:test";
import { escape, exported, readPage, readShown, shell } from "../core/panel";

const PAGE = { title: "f <run>", body: "<h1>f</h1>", style: "h1 { margin: 0 }", charts: { gains: {} } };

test("the panel policy allows only its own script and no network", () => {
  const text = shell("h1 {}", "https://host/report.js", "https://host", "abc");
  assert.match(text, /default-src 'none'; script-src 'nonce-abc'; style-src 'nonce-abc'; img-src https:\/\/host data:"/);
  assert.equal(text.match(/<script/g)?.length, 1);
  assert.match(text, /<script nonce="abc" src="https:\/\/host\/report\.js">/);
  assert.doesNotMatch(text, /unsafe-eval|unsafe-inline/);
});

test("an exported report has no scripts and embeds its images", () => {
  const text = exported(PAGE, "<figure><svg></svg></figure>");
  assert.doesNotMatch(text, /<script|script-src/);
  assert.match(text, /<title>f &lt;run&gt;<\/title>/);
  assert.match(text, /<figure><svg><\/svg><\/figure>/);
  assert.match(text, /h1 \{ margin: 0 \}/);
});

test("invalid answers and panel states are rejected", () => {
  assert.deepEqual(readPage(PAGE), PAGE);
  for (const other of [null, [], { ...PAGE, charts: null }, { title: "f" }]) assert.equal(readPage(other), undefined);
  assert.deepEqual(readShown({ uri: "file:///a.py", target: "f" }), { uri: "file:///a.py", target: "f" });
  for (const other of [undefined, { uri: 1, target: "f" }, "f"]) assert.equal(readShown(other), undefined);
});

test("text is escaped as HTML", () => {
  assert.equal(escape("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
});
