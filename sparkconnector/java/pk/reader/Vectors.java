// Columns over a decoded batch, in memory of the Java heap.
//
// Spark may still read a column after the task that made it has ended (a Python UDF's writer thread does,
// SPARK-33277).  Nothing here is ever freed or reused, so such a reader sees old rows and never foreign
// memory.  Java checks every index against its array.
package pk.reader;

import java.util.Arrays;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

final class Vectors {
  private Vectors() {}

  /** A column without nulls whose values a subclass returns; every other getter is refused. */
  private abstract static class Base extends ColumnVector {
    Base(DataType type) {
      super(type);
    }

    private UnsupportedOperationException refused() {
      return new UnsupportedOperationException("a column of " + type.simpleString());
    }

    @Override
    public void close() {}

    @Override
    public boolean hasNull() {
      return false;
    }

    @Override
    public int numNulls() {
      return 0;
    }

    @Override
    public boolean isNullAt(int row) {
      return false;
    }

    @Override
    public boolean getBoolean(int row) {
      throw refused();
    }

    @Override
    public byte getByte(int row) {
      throw refused();
    }

    @Override
    public short getShort(int row) {
      throw refused();
    }

    @Override
    public int getInt(int row) {
      throw refused();
    }

    @Override
    public long getLong(int row) {
      throw refused();
    }

    @Override
    public float getFloat(int row) {
      throw refused();
    }

    @Override
    public double getDouble(int row) {
      throw refused();
    }

    @Override
    public ColumnarArray getArray(int row) {
      throw refused();
    }

    @Override
    public ColumnarMap getMap(int row) {
      throw refused();
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      throw refused();
    }

    @Override
    public UTF8String getUTF8String(int row) {
      throw refused();
    }

    @Override
    public byte[] getBinary(int row) {
      throw refused();
    }

    @Override
    public ColumnVector getChild(int ordinal) {
      throw refused();
    }
  }

  /** Numbers: offsets, or timestamps in microseconds. */
  static final class Longs extends Base {
    private final long[] values;
    private final int first;

    Longs(DataType type, long[] values, int first) {
      super(type);
      this.values = values;
      this.first = first;
    }

    @Override
    public long getLong(int row) {
      return values[first + row];
    }
  }

  /** Keys, values or header keys: value `i` is `data[ends[i] - length, ends[i])`. */
  static final class Bytes extends Base {
    private final byte[] data;
    private final int[] starts; // one more than there are values
    private final byte[] bits; // null = no value is null
    private final int bitsAt;
    private final int first;
    private final int count;

    Bytes(
        DataType type, byte[] data, int[] starts, byte[] bits, int bitsAt, int first, int count) {
      super(type);
      this.data = data;
      this.starts = starts;
      this.bits = bits;
      this.bitsAt = bitsAt;
      this.first = first;
      this.count = count;
    }

    @Override
    public boolean hasNull() {
      return bits != null && numNulls() > 0;
    }

    @Override
    public int numNulls() {
      int found = 0;
      for (int row = 0; bits != null && row < count; row++) {
        found += isNullAt(row) ? 1 : 0;
      }
      return found;
    }

    @Override
    public boolean isNullAt(int row) {
      int at = first + row;
      return bits != null && (bits[bitsAt + (at >> 3)] >> (at & 7) & 1) == 0;
    }

    @Override
    public byte[] getBinary(int row) {
      return isNullAt(row)
          ? null : Arrays.copyOfRange(data, starts[first + row], starts[first + row + 1]);
    }

    @Override
    public UTF8String getUTF8String(int row) {
      int start = starts[first + row];
      return isNullAt(row)
          ? null : UTF8String.fromBytes(data, start, starts[first + row + 1] - start);
    }
  }

  /** A column in which every value is null. */
  static final class Nulls extends Base {
    private final int count;

    Nulls(DataType type, int count) {
      super(type);
      this.count = count;
    }

    @Override
    public boolean hasNull() {
      return count > 0;
    }

    @Override
    public int numNulls() {
      return count;
    }

    @Override
    public boolean isNullAt(int row) {
      return true;
    }

    @Override
    public byte[] getBinary(int row) {
      return null;
    }

    @Override
    public ColumnarArray getArray(int row) {
      return null;
    }
  }

  /** Lists of headers; an empty list is null, as Spark's Kafka connector shows it. */
  static final class Headers extends Base {
    private final Pairs pairs;
    private final int[] starts;
    private final int first;
    private final int count;

    Headers(DataType list, DataType pair, ColumnVector keys, ColumnVector values, int[] starts,
        int first, int count) {
      super(list);
      pairs = new Pairs(pair, keys, values);
      this.starts = starts;
      this.first = first;
      this.count = count;
    }

    @Override
    public boolean hasNull() {
      return numNulls() > 0;
    }

    @Override
    public int numNulls() {
      int found = 0;
      for (int row = 0; row < count; row++) {
        found += isNullAt(row) ? 1 : 0;
      }
      return found;
    }

    @Override
    public boolean isNullAt(int row) {
      return starts[first + row] == starts[first + row + 1];
    }

    @Override
    public ColumnarArray getArray(int row) {
      int start = starts[first + row];
      return isNullAt(row)
          ? null : new ColumnarArray(pairs, start, starts[first + row + 1] - start);
    }
  }

  private static final class Pairs extends Base {
    private final ColumnVector keys;
    private final ColumnVector values;

    Pairs(DataType type, ColumnVector keys, ColumnVector values) {
      super(type);
      this.keys = keys;
      this.values = values;
    }

    @Override
    public ColumnVector getChild(int ordinal) {
      return ordinal == 0 ? keys : values;
    }
  }
}
