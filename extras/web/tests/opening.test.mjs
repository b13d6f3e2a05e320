import assert from "node:assert/strict";
import { test } from "node:test";
import { openingRun, openingWithout } from "../page/opening.js";

// two given characters, two new ones, so three columns of two numbers; the second of three heads
const taken = (moved, x) => ({ key: [x, x], value: [-x, x], query: [x, 0], probabilities: [1, 0], moved, next: 1 });
const INFO = {
  head_size: 2, n_head: 3,
  opening: {
    ids: [4, 5, 6, 7], given: 2, layer: 1, head: 1,
    keys: [1, 2, 3, 4, 5, 6], values: [7, 8, 9, 10, 11, 12], query: [13, 14],
    probabilities: [[0.25, 0.75], [0.5, 0.5]], taken: [taken(0.5, 20), taken(0.75, 30)],
  },
};

test("the run has the steps, columns and query of the opening", () => {
  const run = openingRun(INFO, { ids: [4, 5] });
  assert.deepEqual(run.on.map(({ id, computed }) => [id, computed]), [[6, 2], [7, 1]]);
  assert.deepEqual(run.off.map(({ id, computed }) => [id, computed]), [[6, 2], [7, 3]]);
  assert.deepEqual(run.on[1].probabilities, [0.5, 0.5]);
  assert.equal(run.kept.length, 3);
  assert.deepEqual([...run.kept.lane(1, 0, 1)], [1, 2, 3, 4, 5, 6]);
  assert.deepEqual([...run.queries[1].subarray(2, 4)], [13, 14]);
});

test("the column that moves most is taken out, and only the newest column changes with it", () => {
  const answer = openingWithout(INFO, [0, 1]);
  assert.deepEqual([answer.masked, answer.moved], [1, 0.75]);
  assert.deepEqual([...answer.kept.lane(1, 0, 1)], [1, 2, 3, 4, 30, 30]);
  assert.deepEqual([...answer.kept.lane(1, 1, 1)], [7, 8, 9, 10, -30, 30]);
  assert.deepEqual([...answer.queries[1].subarray(2, 4)], [30, 0]);
  assert.equal(openingWithout(INFO, [0]).masked, 0);
});
